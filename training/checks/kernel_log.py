"""What else the kernel's log tells of a node's health: processes killed for memory, broken memory, broken disks."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from training.checks.finding import Action, Finding, Severity
from training.checks.machine import Hung, Machine

LINES: Final = 20_000
"""Of the journal that are read, its newest; the kernel's own buffer is smaller."""
_Rule = tuple[re.Pattern[str], Severity, str, str, Action]
RULES: Final[tuple[_Rule, ...]] = (
    (
        re.compile(r"Out of memory: Kill|oom-kill:|oom_reaper: reaped|Memory cgroup out of memory"),
        "warn", "a process was killed for memory", "see which; a run needs more memory than was free", "monitor",
    ),
    (
        re.compile(r"Uncorrected (hardware )?(memory )?error|\bUE memory|Machine check.*[Uu]ncorrected"),
        "refuse", "main memory had an uncorrected error", "replace the node", "isolate",
    ),
    (
        re.compile(r"mce: \[Hardware Error\]|Machine check events logged"),
        "warn", "the processor reports hardware errors", "replace the node if they go on", "monitor",
    ),
    (
        re.compile(r"EXT4-fs error|XFS \(\S+\): .*(corruption|I/O [Ee]rror)|Remounting filesystem read-only"),
        "refuse", "a file system is broken", "replace the node", "isolate",
    ),
    (
        re.compile(r"nvme\d*: (I/O .* timeout|controller is down)|blk_update_request: I/O error|critical medium error"),
        "warn", "a disk had errors", "replace the node if they go on", "monitor",
    ),
    (
        re.compile(r"LustreError: .*(evicted|was lost)|Connection to \S+ \(at \S+\) was lost"),
        "warn", "Lustre lost its connection", "see the file system's health", "monitor",
    ),
    (
        re.compile(r"task \S+ blocked for more than \d+ seconds"),
        "warn", "a process hung in the kernel", "see what it waits for", "monitor",
    ),
)  # fmt: skip


def lines(machine: Machine) -> list[str] | None:
    """The kernel's log since the start, None if this user may not read it."""
    for argv in (("dmesg", "--time-format", "iso"), ("dmesg",), ("journalctl", "-k", "-b", "--no-pager", f"-n{LINES}")):
        try:
            said = machine.run(*argv)
        except Hung:
            continue
        if said and said.code == 0 and said.out.strip():
            return said.out.splitlines()
    return None


def judge(log: Iterable[str]) -> list[Finding]:
    """Judge a log; each kind of trouble is told once, with its last line."""
    seen: Counter[int] = Counter()
    last: dict[int, str] = {}
    for line in log:
        for number, rule in enumerate(RULES):
            if rule[0].search(line):
                seen[number] += 1
                last[number] = line.strip()
                break
    return [_finding(RULES[number], seen[number], last[number]) for number in sorted(seen)]


def judge_edac(machine: Machine) -> list[Finding]:
    """Judge the counts of the memory controllers (linux, Documentation/admin-guide/RAS)."""
    found = []
    controllers = "/sys/devices/system/edac/mc"
    for name in machine.names(controllers, "mc[0-9]*"):
        if count := machine.number(f"{controllers}/{name}/ue_count"):
            what = f"{count} uncorrected errors of main memory"
            found.append(Finding("refuse", what, device=name, todo="replace the node", action="isolate"))
        if count := machine.number(f"{controllers}/{name}/ce_count"):
            what = f"{count} corrected errors of main memory"
            found.append(Finding("warn", what, device=name, todo="replace the node if it grows", action="monitor"))
    return found


def unreadable(log: Sequence[str] | None) -> list[Finding]:
    """Say that a log could not be read, so that its silence is not taken for health."""
    if log is not None:
        return []
    return [Finding("warn", "the kernel's log cannot be read: Xids go unseen", todo="let this user run dmesg")]


def _finding(rule: _Rule, times: int, last: str) -> Finding:
    _, severity, what, todo, action = rule
    count = f", {times} times" if times > 1 else ""
    return Finding(severity, f"{what}{count}: {last[-160:]}", todo=todo, action=action)
