"""A node's report for a person: two columns, and what was found at the end."""

from typing import Any


def table(report: dict[str, Any]) -> str:
    """Lay out one of result.json's nodes."""
    software = [(name.replace("_", " "), told) for name, told in report["software"].items() if told != "absent"]
    absent = ", ".join(name.replace("_", " ") for name, told in report["software"].items() if told == "absent")
    sections = {
        report["host"]: [*software, *([("absent", absent)] if absent else [])],
        "machine": [*_machine(report["machine"])],
        "GPUs": [(f"GPU {gpu['index']}", _gpu(gpu)) for gpu in report["gpus"]],
        "EFA": [(name, "usable") for name in report["efa"]["usable"] or []],
        "disks": [(disk["path"], _disk(disk)) for disk in report["disks"]["mounts"]],
        "speeds": [(speed["where"], _speed(speed)) for speed in report["disks"]["speeds"]],
    }
    lines = [line for title, rows in sections.items() if rows for line in (title, *_rows(rows), "")]
    return "\n".join([*lines, *_findings(report["findings"])])


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {told}" for name, told in rows]


def _machine(seen: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("processors", f"{seen['cpus']}, {seen['numa_nodes']} NUMA nodes"),
        ("memory", f"{seen['memory_gib']} GiB, {seen['available_gib']} available"),
        ("/dev/shm", f"{seen['shared_memory_bytes'] / 2**30:.1f} GiB"),  # noqa: S108  # nothing is written there
    ]


def _gpu(gpu: dict[str, Any]) -> str:
    up = sum(speed > 0 for speed in gpu["nvlinks"])
    links = f", {up} NVLinks" if gpu["nvlinks"] else ""
    return f"{gpu['product']}, {gpu['memory_mib']} MiB, {gpu['address']}, {gpu['temperature_c']} °C{links}"


def _disk(disk: dict[str, Any]) -> str:
    return f"{disk['kind']} at {disk['mount']}, {disk['free'] / 1e9:.1f} of {disk['total'] / 1e9:.1f} GB free"


def _speed(speed: dict[str, Any]) -> str:
    told = f"writes {speed['write_mb_per_s']:.0f} MB/s, reads {speed['read_mb_per_s']:.0f} MB/s"
    return speed["problem"] or told


def _findings(findings: list[dict[str, Any]]) -> list[str]:
    if not findings:
        return ["nothing is wrong"]
    lines = []
    for finding in findings:
        where = f"{finding['device']}: " if finding["device"] else ""
        action = f" [{finding['action']}]" if finding["action"] else ""
        lines += [f"{finding['severity'].upper():<6}  {where}{finding['what']}{action}", f"        → {finding['todo']}"]
    return lines
