"""What the NVIDIA driver says in the kernel's log: Xids of GPUs, SXids of NVSwitches, and what each asks for.

The buckets of codes are NVIDIA's "Resolution Bucket (Immediate Action)", for Ampere and newer:
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, as leptonai/gpud 4a8de33a3f02 keeps it (2025-10);
what a bucket means for a node of ours follows awslabs/awsome-distributed-ai 95b939cdc5b2,
4.validation_and_observability/2.gpu-cluster-healthcheck.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from training.checks.finding import GRAVEST, Action, Finding

_Codes = tuple[int, ...]
UNUSED: Final[_Codes] = (
    *range(1, 8), 9, 10, 12, *range(15, 25), *range(26, 31), *range(33, 37), 42, 47, *range(49, 54), *range(55, 60),
    61, 65, 73, 81, 87, 90, 91, *range(111, 119), *range(122, 126), 138, 142,
)  # fmt: skip
BUCKETS: Final[dict[str, _Codes]] = {
    "CHECK_MECHANICALS": (54,),
    "RESTART_BM": (79,),
    "RESTART_VM": (151,),
    "BOOT_REATTEMPT_OR_ENABLE_ECC": (168,),
    "RESET_GPU": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "WORKFLOW_XID_48": (48, 171, 172),  # 171 and 172 are said beside 48: DRAM or SRAM
    "WORKFLOW_NVLINK_ERR": (74,),
    "WORKFLOW_NVLINK5_ERR": (144, 145, 146, 147, 148, 149, 150),
    "WORKFLOW_XID_45": (45,),
    "XID_154": (154,),
    "CHECK_UVM": (159,),
    "UPDATE_SWFW": (78,),
    "RESTART_APP": (
        8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94,
        *range(96, 106), *range(126, 136), 139,
    ),
    "IGNORE": (
        14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161,
    ),
    "POWER_SMOOTHING": (162, 163, 164, 165),
    "NOT_SAID": (166, 167, 169, 170),  # in the catalogue without an action
    "CONTACT_SUPPORT": UNUSED,
}  # fmt: skip
ACTIONS: Final[dict[str, Action]] = {
    "CHECK_MECHANICALS": "isolate",
    "RESTART_BM": "reboot",
    "RESTART_VM": "reboot",
    "BOOT_REATTEMPT_OR_ENABLE_ECC": "reboot",
    "RESET_GPU": "reset",
    "WORKFLOW_XID_48": "reset",
    "WORKFLOW_NVLINK_ERR": "reset",
}
"""Of buckets that are not named, "monitor": an application's fault, or something for the people who support the GPU."""
ON_A100: Final[dict[int, Action]] = {64: "reboot", 95: "reboot"}
"""A100s are not reset out of these; source: the health check named above."""
RECOVERY: Final[dict[str, Action]] = {
    "Drain P2P": "reset",
    "Drain and Reset": "reset",
    "GPU Reset Required": "reset",
    "Node Reboot Required": "reboot",
    "OS Reboot": "reboot",
}
"""Xid 154 tells what to do in words."""
MEANINGS: Final[dict[int, str]] = {
    13: "graphics engine exception", 31: "GPU memory page fault", 43: "GPU stopped processing",
    45: "cleanup after another error", 46: "GPU stopped processing", 48: "double bit ECC error",
    54: "auxiliary power is not connected", 62: "micro-controller halt", 63: "GPU memory was remapped",
    64: "GPU memory could not be remapped", 74: "NVLink error", 78: "vGPU start error",
    79: "GPU has fallen off the bus", 92: "many single bit ECC errors", 94: "contained memory error",
    95: "uncontained memory error", 109: "context switch timeout", 110: "security fault", 119: "GSP RPC timeout",
    120: "GSP error", 121: "C2C error", 136: "link training failed", 137: "NVLink privilege error",
    140: "unrecovered ECC error", 143: "GPU initialization error", 144: "NVLink SAW error", 145: "NVLink RLW error",
    146: "NVLink TLW error", 147: "NVLink TREX error", 148: "NVLink NVLPW_CTRL error", 149: "NVLink NETIR error",
    150: "NVLink MSE error", 151: "key rotation error", 154: "recovery action", 155: "NVLink software defined error",
    156: "resource retirement", 157: "resource retirement failed", 158: "GPU fatal timeout", 159: "CHI non-data error",
    160: "channel retirement", 161: "channel retirement failed", 162: "power smoothing is on again",
    163: "power smoothing is off", 164: "power smoothing is near its end", 165: "power smoothing has ended",
    167: "PCIe fatal timeout", 168: "GPU memory capacity is reduced", 169: "SEC2 micro-controller halt",
    171: "uncorrectable DRAM error", 172: "uncorrectable SRAM error",
}  # fmt: skip
TODO: Final[dict[Action, str]] = {
    "isolate": "take the node out and replace it",
    "reboot": "reboot the node and check it again, or replace it",
    "reset": "end what uses the GPU and run nvidia-smi --gpu-reset, or reboot the node",
    "monitor": "no need to act; look again if a run fails here",
}
XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
SXID: Final = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Non-fatal|Fatal), (.*)")
LOADED: Final = "NVRM: loading NVIDIA"
"""The driver begins anew, with GPUs that were reset."""


@dataclass(frozen=True, slots=True)
class Event:
    """A code of one device, how often it was seen, and the gravest thing it asked for."""

    kind: str
    """`Xid` or `SXid`."""
    address: str
    """`0000:9b:00` for GPUs, as the log has it."""
    code: int
    action: Action
    text: str
    times: int = 1


def bucket(code: int) -> str:
    """Which of NVIDIA's actions a code has; "" for one that is not in the catalogue."""
    return next((name for name, codes in BUCKETS.items() if code in codes), "")


def action(code: int, text: str = "", product: str = "") -> Action:
    """What a node needs after an Xid, from its line's text and the GPU's product name."""
    if code == 154:
        return next((what for words, what in RECOVERY.items() if f"({words})" in text.partition(" to ")[2]), "monitor")
    if "A100" in product and code in ON_A100:
        return ON_A100[code]
    name = bucket(code)
    if name == "WORKFLOW_NVLINK5_ERR":
        return "reset" if " Fatal " in f" {text} " else "monitor"
    return ACTIONS.get(name, "monitor")


def events(log: Iterable[str], product: str = "") -> list[Event]:
    """What a kernel's log tells and has not taken back, a line per device and code.

    Loading the driver ends what was before it, and an Xid 154 to "None" what its GPU had.
    """
    seen: dict[tuple[str, str, int], Event] = {}
    for line in log:
        if LOADED in line:
            seen.clear()
        event = _event(line, product)
        if event is None:
            continue
        if event.code == 154 and event.text.partition(" to ")[2].endswith("(None)"):
            seen = {key: old for key, old in seen.items() if key[1] != event.address}
            continue
        key = (event.kind, event.address, event.code)
        seen[key] = _graver(seen[key], event) if key in seen else event
    return list(seen.values())


def findings(seen: Iterable[Event], gpus: dict[str, str]) -> list[Finding]:
    """Judge events; `gpus` names devices by their PCI address, as `short` writes it."""
    return [_finding(event, gpus.get(short(event.address), event.address)) for event in seen]


def short(address: str) -> str:
    """A PCI address as the log has it: `00000000:9B:00.0` is `0000:9b:00`."""
    return ":".join((part[-4:] if place == 0 else part.partition(".")[0]).lower() for place, part in _parts(address))


def _parts(address: str) -> Iterable[tuple[int, str]]:
    return enumerate(address.split(":"))


def _event(line: str, product: str) -> Event | None:
    if found := XID.search(line):
        address, code, text = found[1], int(found[2]), found[3] or ""
        return Event("Xid", address, code, action(code, text, product), text)
    if found := SXID.search(line):
        return Event("SXid", found[1], int(found[2]), "reset" if found[3] == "Fatal" else "monitor", found[4])
    return None


def _graver(old: Event, new: Event) -> Event:
    worse = min(old, new, key=lambda event: GRAVEST.index(event.action))
    return replace(worse, times=old.times + 1)


def _finding(event: Event, device: str) -> Finding:
    meaning = MEANINGS.get(event.code, "") if event.kind == "Xid" else ""
    known = event.kind == "SXid" or bucket(event.code)
    parts = [f"{event.kind} {event.code}", meaning or ("" if known else "not in NVIDIA's catalogue"), event.text[:120]]
    times = f", {event.times} times" if event.times > 1 else ""
    return Finding(
        "warn" if event.action == "monitor" else "refuse",
        ": ".join(filter(None, parts)) + times,
        device=device if event.kind == "Xid" else f"NVSwitch {event.address}",
        todo=TODO[event.action],
        action=event.action,
    )
