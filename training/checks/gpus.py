"""GPUs as nvidia-smi reports them (`-q -x`, `nvlink`), and what of it keeps a training run from them.

Names of elements: NVIDIA's nvsmi_device_v11.dtd to v13.dtd. Since the driver may not know something of a GPU ("N/A"),
what is not said is not held against it.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from xml.etree.ElementTree import Element

from training.checks.finding import Action, Finding

NVLINKS: Final = (
    (re.compile(r"V100-SXM"), 6, 8),
    (re.compile(r"A100-SXM"), 12, 4),
    (re.compile(r"H100 80GB HBM3|H200(?! NVL)|\bG?B[23]00\b"), 18, 4),
)
"""Links per GPU of a board with NVLink, all up in nodes with that many GPUs: p5.4xlarge's one H100 has nobody to link
to. Source: awslabs/awsome-distributed-ai, efa-cheatsheet.md, and NVIDIA's V100 architecture paper."""
RESETS: Final = ("reset_required", "drain_and_reset_recommended")
MUCH_MIB: Final = 1024
"""Of GPU memory, held by others: a plan made for the whole of it no longer fits."""


class Unreadable(Exception):
    """A tool's answer is not what it should be; the message says whose."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that uses a GPU."""

    pid: int
    name: str
    mib: int


@dataclass(slots=True)
class Gpu:
    """One GPU. Words are nvidia-smi's, "" for what it does not tell; so are counts, None."""

    index: int
    address: str
    product: str
    uuid: str
    serial: str
    memory_mib: int | None
    vbios: str
    persistence: str
    mig: str
    compute_mode: str
    ecc: str
    recovery: str
    reset_required: str
    volatile_uncorrected: int | None
    aggregate_uncorrected: int | None
    sram_threshold_exceeded: str
    rows_pending: str
    rows_failed: str
    pages_pending: str
    state: str
    throttled: tuple[str, ...]
    power_limit_w: float | None
    power_default_w: float | None
    clock_mhz: tuple[int | None, int | None]
    """Of applications: as it is set, and as it is by default; newer drivers do not tell."""
    max_clock_mhz: int | None
    link_width: tuple[int | None, int | None]
    """Now and at most; so is `link_generation`."""
    link_generation: tuple[int | None, int | None]
    temperature_c: int | None
    fabric: tuple[str, str]
    """State and status of the NVSwitch fabric."""
    holders: tuple[Holder, ...] = ()
    nvlinks: tuple[float, ...] = ()
    """GB/s of each, 0 for one that is down."""
    nvlink_errors: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How findings call it."""
        return f"GPU {self.index}"


def read(xml: str) -> list[Gpu]:
    """Read what `nvidia-smi -q -x` prints. Raises `Unreadable`."""
    try:
        log = ET.fromstring(xml)  # noqa: S314  # from a tool of this machine, without entities
    except ET.ParseError as problem:
        raise Unreadable(f"nvidia-smi -q -x answered no XML: {problem}") from problem
    return [_gpu(index, element) for index, element in enumerate(log.findall("gpu"))]


def read_nvlinks(status: str) -> dict[int, tuple[float, ...]]:
    """Read what `nvidia-smi nvlink --status` prints: GPU → GB/s of its links, 0 for `<inactive>` ones."""
    return {
        index: tuple(float(speed or 0) for speed in re.findall(r"Link \d+: (?:([0-9.]+) GB/s|<inactive>)", part))
        for index, part in _by_gpu(status)
    }


def read_nvlink_errors(told: str) -> dict[int, dict[str, int]]:
    """Read what `nvidia-smi nvlink -e` prints: GPU → kind of error → its count over all links, those that occurred."""
    every: dict[int, dict[str, int]] = {}
    for index, part in _by_gpu(told):
        counts = every.setdefault(index, {})
        for kind, count in re.findall(r"Link \d+: ([A-Za-z ]+) Errors?: (\d+)", part):
            if int(count):
                counts[kind] = counts.get(kind, 0) + int(count)
    return every


def count(gpus: list[Gpu], expected: int, product: str, on_bus: Iterable[str]) -> list[Finding]:
    """Compare with what the instance should have; `on_bus` are the PCI addresses of GPUs, driver or not."""
    found = []
    if len(gpus) < expected:
        silent = sorted(set(on_bus) - {gpu.address for gpu in gpus})
        found.append(
            Finding(
                "refuse",
                f"{len(gpus)} of {expected} GPUs answer"
                + (f"; on the bus, but silent: {', '.join(silent)}" if silent else "; the others are not on the bus"),
                device=f"GPU at {', '.join(silent)}" if silent else "",
                todo="reboot the node, and replace it if they do not come back",
                action="isolate",
            )
        )
    if len(gpus) > expected > 0:
        found.append(Finding("warn", f"{len(gpus)} GPUs answer where {expected} were expected", todo="check the type"))
    strangers = [gpu for gpu in gpus if expected and product and not is_a(gpu.product, product)]
    return found + [
        Finding("refuse", f"it is a {gpu.product}, not a {product}", device=gpu.name, todo="check the instance type")
        for gpu in strangers
    ]


def is_a(product: str, expected: str) -> bool:
    """Whether nvidia-smi's name is that of a catalogue's: `NVIDIA A100-SXM4-80GB` is an `NVIDIA A100 80GB`."""
    maker = {"NVIDIA", "TESLA"}
    return _words(expected) - maker <= _words(product)


def judge(gpu: Gpu, others: Iterable[Gpu] = ()) -> list[Finding]:
    """Judge one GPU, beside the others of its node."""
    node = [gpu, *others]
    told = [
        *_memory(gpu),
        *_recovery(gpu),
        *_clocks(gpu),
        *_settings(gpu),
        *_holders(gpu),
        *_fabric(gpu),
        *_bus(gpu, node),
    ]
    told += _nvlink(gpu, len(node))
    return [
        Finding(severity, what, device=gpu.name, todo=todo, action=action)  # type: ignore[arg-type]  # its two words
        for severity, what, todo, action in told
    ]


_Told = Iterable[tuple[str, str, str, Action]]


def _memory(gpu: Gpu) -> _Told:
    replace = "replace the node: the GPU is to be returned"
    if gpu.rows_failed == "Yes":
        yield "refuse", "remapping a row of its memory failed", replace, "isolate"
    if gpu.sram_threshold_exceeded == "Yes":
        yield "refuse", "its SRAM had more uncorrected errors than it may", replace, "isolate"
    if gpu.volatile_uncorrected:
        errors = f"{gpu.volatile_uncorrected} uncorrected memory errors since the driver was loaded"
        yield "refuse", errors, "reset the GPU; replace the node if they come back", "reset"
    if gpu.rows_pending == "Yes":
        yield "refuse", "a row of its memory waits to be remapped", "reset the GPU", "reset"
    if gpu.pages_pending == "Yes":
        yield "refuse", "a page of its memory waits to be retired", "reboot the node", "reboot"
    if gpu.aggregate_uncorrected and not gpu.volatile_uncorrected:
        yield "warn", f"{gpu.aggregate_uncorrected} uncorrected memory errors in its life", "watch it", "monitor"
    if gpu.ecc == "Disabled":
        yield "warn", "ECC is off: errors of its memory go unseen", "nvidia-smi -e 1, and reboot", "monitor"


def _recovery(gpu: Gpu) -> _Told:
    if gpu.recovery not in ("", "None"):
        action: Action = "reboot" if "Reboot" in gpu.recovery else "reset"
        yield "refuse", f"the driver asks for: {gpu.recovery}", f"{action} it", action
    elif gpu.reset_required == "Yes":
        yield "refuse", "the driver asks for a reset", "end what uses it and run nvidia-smi --gpu-reset", "reset"


def _clocks(gpu: Gpu) -> _Told:
    for reason in gpu.throttled:
        if reason == "sw_thermal_slowdown":
            yield "warn", f"its clocks are lowered: {reason}", "watch its temperature", "monitor"
        else:
            yield "refuse", f"its clocks are lowered by hardware: {reason}", "replace the node", "isolate"
    if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < 0.99 * gpu.power_default_w:
        limits = f"its power is capped at {gpu.power_limit_w:g} W, not {gpu.power_default_w:g} W"
        yield "warn", limits, f"nvidia-smi -i {gpu.index} -pl {gpu.power_default_w:g}", ""
    now, usual = gpu.clock_mhz
    if now and usual and now < usual:
        yield "warn", f"its clock is set to {now} MHz, not {usual} MHz", f"nvidia-smi -i {gpu.index} -rac", ""


def _bus(gpu: Gpu, node: list[Gpu]) -> _Told:
    """Look for a link that is less than it should be: what the GPU can do on boards with NVLink, else what others do.

    An A10G of EC2's g5 has 8 of 16 lanes when all is well.
    """
    todo = "reboot the node; replace it if it stays"
    whole = _links(gpu) > 0  # a board of NVIDIA's
    lanes = gpu.link_width[1] if whole else max((one.link_width[0] or 0 for one in node), default=0)
    if gpu.link_width[0] and lanes and gpu.link_width[0] < lanes:
        yield "refuse", f"its PCIe link has {gpu.link_width[0]} lanes, not {lanes}", todo, "reboot"
    # an idle GPU's link sleeps at a lower generation; in P0 it is awake
    awake = [one.link_generation[0] or 0 for one in node if one.state == "P0"]
    best = gpu.link_generation[1] if whole else max(awake, default=0)
    if gpu.state == "P0" and gpu.link_generation[0] and best and gpu.link_generation[0] < best:
        yield "warn", f"its PCIe link is generation {gpu.link_generation[0]}, not {best}", "measure it", "monitor"


def _settings(gpu: Gpu) -> _Told:
    if gpu.mig == "Enabled":
        yield "refuse", "MIG is on: it is not one whole GPU", f"nvidia-smi -i {gpu.index} -mig 0", "reset"
    if gpu.compute_mode == "Prohibited":
        yield "refuse", "its compute mode is Prohibited", f"nvidia-smi -i {gpu.index} -c DEFAULT", ""
    if gpu.persistence == "Disabled":
        yield "warn", "persistence mode is off: starts are slow", "start nvidia-persistenced", ""


def _fabric(gpu: Gpu) -> _Told:
    state, status = gpu.fabric
    if state not in ("", "Completed") or (status not in ("", "Success") and state == "Completed"):
        todo = "start nvidia-fabricmanager, or reboot the node"
        yield "refuse", f"the NVSwitch fabric is {state} ({status or 'no status'})", todo, "reboot"


def _nvlink(gpu: Gpu, together: int) -> _Told:
    links = _links(gpu, together)
    up = sum(speed > 0 for speed in gpu.nvlinks)
    down = ", ".join(str(number) for number, speed in enumerate(gpu.nvlinks) if not speed)
    if up < links and gpu.mig != "Enabled":
        which = f"; down: link {down}" if down else ""
        yield "refuse", f"{up} of {links} NVLinks are up{which}", "reset all GPUs, or reboot the node", "reset"
    slow = [number for number, speed in enumerate(gpu.nvlinks) if 0 < speed < 0.9 * max(gpu.nvlinks)]
    if slow:
        yield "warn", f"NVLink {', '.join(map(str, slow))} is slower than the others", "watch it", "monitor"
    for kind, number in gpu.nvlink_errors.items():
        yield "warn", f"{number} NVLink {kind.lower()} errors", "reset all GPUs if it grows in a run", "monitor"


def _links(gpu: Gpu, together: int = 8) -> int:
    """How many NVLinks it has up in a node of so many GPUs."""
    return next((number for kind, number, least in NVLINKS if kind.search(gpu.product) and together >= least), 0)


def _holders(gpu: Gpu) -> _Told:
    for holder in gpu.holders:
        severity = "refuse" if holder.mib >= MUCH_MIB else "warn"
        what = f"process {holder.pid} ({holder.name}) holds {holder.mib} MiB of its memory"
        yield severity, what, "end it before training starts", ""


def _gpu(index: int, element: Element) -> Gpu:
    def told(*paths: str) -> str:
        return next((text for path in paths if (text := _word(element.findtext(path)))), "")

    def number(*paths: str) -> int | None:
        return _whole(told(*paths))

    fast, reset = "pci/pci_gpu_link_info", "gpu_reset_status"
    return Gpu(
        index=index,
        address=told("pci/pci_bus_id") or element.get("id", ""),
        product=told("product_name"),
        uuid=told("uuid"),
        serial=told("serial"),
        memory_mib=number("fb_memory_usage/total"),
        vbios=told("vbios_version"),
        persistence=told("persistence_mode"),
        mig=told("mig_mode/current_mig"),
        compute_mode=told("compute_mode"),
        ecc=told("ecc_mode/current_ecc"),
        recovery=element.findtext("gpu_recovery_action", "").strip().replace("N/A", ""),
        reset_required="Yes" if "Yes" in (told(f"{reset}/{word}") for word in RESETS) else "",
        volatile_uncorrected=_uncorrected(element, "volatile"),
        aggregate_uncorrected=_uncorrected(element, "aggregate"),
        sram_threshold_exceeded=told("ecc_errors/aggregate/sram_threshold_exceeded"),
        rows_pending=told("remapped_rows/remapped_row_pending"),
        rows_failed=told("remapped_rows/remapped_row_failure"),
        pages_pending=told("retired_pages/pending_retirement"),
        state=told("performance_state"),
        throttled=_throttled(element),
        power_limit_w=_watts(told("gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit")),
        power_default_w=_watts(told("gpu_power_readings/default_power_limit", "power_readings/default_power_limit")),
        clock_mhz=(
            number("applications_clocks/graphics_clock"),
            number("default_applications_clocks/graphics_clock"),
        ),
        max_clock_mhz=number("max_clocks/sm_clock"),
        link_width=(number(f"{fast}/link_widths/current_link_width"), number(f"{fast}/link_widths/max_link_width")),
        link_generation=(number(f"{fast}/pcie_gen/current_link_gen"), number(f"{fast}/pcie_gen/max_link_gen")),
        temperature_c=number("temperature/gpu_temp"),
        fabric=(told("fabric/state"), told("fabric/status")),
        holders=tuple(_holding(element)),
    )


def _uncorrected(element: Element, part: str) -> int | None:
    """All uncorrected errors since the driver was loaded, or in the GPU's life; what adds up others is left out."""
    counts = [
        number
        for told in element.findall(f"ecc_errors/{part}/*")
        if "uncorrectable" in told.tag and (number := _whole(told.text or "")) is not None
    ]
    return sum(counts) if counts else None


def _throttled(element: Element) -> tuple[str, ...]:
    """What lowers the clocks and should not; idle GPUs and power limits lower them all the time."""
    bad = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
    told = [*element.findall("clocks_event_reasons/*"), *element.findall("clocks_throttle_reasons/*")]
    active = [reason.tag.split("_reason_", 1)[-1] for reason in told if (reason.text or "").strip() == "Active"]
    names = tuple(name for name in active if name in bad)
    # hw_slowdown stands for the two others of hardware
    return names if len(names) == 1 else tuple(name for name in names if name != "hw_slowdown")


def _holding(element: Element) -> Iterable[Holder]:
    for process in element.findall("processes/process_info"):
        if "C" in process.findtext("type", ""):  # C computes, G draws, C+G both
            pid, mib = _whole(process.findtext("pid", "")), _whole(process.findtext("used_memory", ""))
            yield Holder(pid or 0, process.findtext("process_name", ""), mib or 0)


def _by_gpu(text: str) -> Iterable[tuple[int, str]]:
    parts = re.split(r"^GPU (\d+):", text, flags=re.MULTILINE)[1:]
    return [(int(index), part) for index, part in zip(parts[::2], parts[1::2], strict=True)]


def _words(name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", name.upper())) - {""}


def _word(text: str | None) -> str:
    told = (text or "").strip()
    return "" if told in ("N/A", "None", "[N/A]") or "deprecated" in told else told


def _whole(text: str) -> int | None:
    found = re.match(r"\d+", text.strip())
    return int(found[0]) if found else None


def _watts(text: str) -> float | None:
    found = re.match(r"[0-9.]+", text)
    return float(found[0]) if found else None
