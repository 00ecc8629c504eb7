"""The accelerators of a node, examined: nvidia-smi, NVLink, the kernel's log, DCGM; of Neuron devices their number."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from training.checks import dcgm, gpus, topology, xid
from training.checks.finding import Finding
from training.checks.gpus import Gpu, Unreadable
from training.checks.machine import Hung, Machine

SMI: Final = "nvidia-smi"
SMI_PATIENCE_S: Final = 60.0
"""Without persistence mode, the driver starts every GPU first."""
CORRUPT: Final = "infoROM is corrupted"


@dataclass(slots=True)
class Accelerators:
    """What was found."""

    gpus: list[Gpu] = field(default_factory=list)
    neuron_devices: int = 0
    findings: list[Finding] = field(default_factory=list)

    def told(self) -> list[dict[str, Any]]:
        """For the report."""
        return [asdict(gpu) for gpu in self.gpus]

    def alike(self) -> dict[str, str]:
        """What nodes of one type have alike."""
        if not self.gpus:
            return {"accelerators": f"{self.neuron_devices} Neuron devices" if self.neuron_devices else "none"}
        products = [gpu.product for gpu in self.gpus]
        return {
            "accelerators": " + ".join(f"{products.count(name)} {name}" for name in dict.fromkeys(products)),
            "vbios": _each(gpu.vbios for gpu in self.gpus),
            "gpu_memory_mib": _each(gpu.memory_mib for gpu in self.gpus),
            "gpu_power_limit_w": _each(gpu.power_limit_w for gpu in self.gpus),
            "gpu_max_clock_mhz": _each(gpu.max_clock_mhz for gpu in self.gpus),
            "gpu_pcie_lanes": _each(gpu.link_width[0] for gpu in self.gpus),
            "ecc": _each(gpu.ecc for gpu in self.gpus),
        }


def examine(machine: Machine, product: str, expected: int, log: Sequence[str]) -> Accelerators:
    """Examine them: `expected` of a catalogue's `product`, or whatever there is if nothing is expected."""
    if product.startswith("AWS"):
        return _neuron(machine, product, expected)
    found = Accelerators()
    on_bus = topology.gpu_addresses(machine)
    try:
        found.gpus = _ask(machine, found.findings, expected or len(on_bus), product)
    except (Hung, Unreadable) as problem:
        todo = "reboot the node; replace it if it happens again"
        found.findings.append(Finding("refuse", str(problem), device="GPUs", todo=todo, action="reboot"))
    if found.gpus:
        found.findings += gpus.count(found.gpus, expected or len(on_bus), product, on_bus)
    for gpu in found.gpus:
        found.findings += gpus.judge(gpu, [other for other in found.gpus if other is not gpu])
    found.findings += _switches(machine)
    products = found.gpus[0].product if found.gpus else product
    known = {xid.short(gpu.address): gpu.name for gpu in found.gpus}
    found.findings += xid.findings(xid.events(log, products), known)
    return found


def diagnose(machine: Machine, level: int) -> list[Finding]:
    """Have DCGM diagnose all GPUs: at level 3, a quarter of an hour that uses them fully."""
    try:
        said = machine.run("dcgmi", "diag", "-r", str(level), "-j", patience_s=dcgm.PATIENCE_S[level])
        if said is None:
            return [Finding("warn", "DCGM is not installed: its diagnosis was left out", todo="install DCGM")]
        return dcgm.read(said.out or said.errors)
    except Hung as problem:
        todo = "replace the node"
        return [Finding("refuse", str(problem), device="GPUs", todo=todo, action="isolate")]
    except Unreadable as problem:
        return [Finding("warn", str(problem), device="DCGM", todo="see whether nv-hostengine runs")]


def _ask(machine: Machine, findings: list[Finding], wanted: int, product: str) -> list[Gpu]:
    """Ask nvidia-smi for everything. Raises `Hung` and `Unreadable`."""
    said = machine.run(SMI, "-q", "-x", patience_s=SMI_PATIENCE_S)
    if said is None:
        if wanted:
            what = f"nvidia-smi is not installed, and {wanted} {product or 'GPUs'} are there to be used"
            findings.append(Finding("refuse", what, device="GPUs", todo="boot an image with the NVIDIA driver"))
        return []
    if "<nvidia_smi_log>" not in said.out:
        first = next(iter((said.out + said.errors).strip().splitlines()), "nothing")
        raise Unreadable(f"nvidia-smi fails with code {said.code}: {first}")
    if CORRUPT in said.out + said.errors:
        what = "nvidia-smi says that an infoROM is corrupted"
        findings.append(Finding("warn", what, device="GPUs", todo="replace the node soon", action="monitor"))
    found = gpus.read(said.out[said.out.index("<nvidia_smi_log>") :])
    links = gpus.read_nvlinks(machine.text(SMI, "nvlink", "--status")) if found else {}
    errors = gpus.read_nvlink_errors(machine.text(SMI, "nvlink", "-e")) if links else {}
    for gpu in found:
        gpu.nvlinks, gpu.nvlink_errors = links.get(gpu.index, ()), errors.get(gpu.index, {})
    return found


def _switches(machine: Machine) -> list[Finding]:
    """NVSwitches carry nothing before their manager, a service, has set them up."""
    switches = topology.addresses(machine, topology.BRIDGE)
    state = machine.line("systemctl", "is-active", "nvidia-fabricmanager") if switches else ""
    if state not in ("inactive", "failed"):
        return []
    what = f"nvidia-fabricmanager is {state}, and there are {len(switches)} NVSwitches"
    return [
        Finding("refuse", what, device="NVSwitch", todo="start the service, of the driver's version", action="reboot")
    ]


def _neuron(machine: Machine, product: str, expected: int) -> Accelerators:
    found = Accelerators(neuron_devices=len(machine.names("/dev", "neuron[0-9]*")))
    if found.neuron_devices < expected:
        what = f"{found.neuron_devices} of {expected} {product} devices are there"
        todo = "see the Neuron driver; replace the node"
        found.findings.append(Finding("refuse", what, device="/dev/neuron*", todo=todo, action="isolate"))
    return found


def _each(values: Any) -> str:
    """Different values, in a line."""
    return ", ".join(dict.fromkeys(str(value) for value in values))
