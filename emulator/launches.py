"""Instances of moto's EC2 that are machines: those of an image with a disk, which is Debian's or was made from one.

An image is the layers of a disk. Debian's has one, from `emulator.debian`; CreateImage moves what an instance has
written into another. Every other image has none, and its instances are moto's records.
"""

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

from emulator import debian, machines, memory
from emulator.extension import PAGES, Call, Fault, answers
from emulator.images import DEBIAN, image_id
from emulator.machines import Machine

Hook = Callable[..., Any]
FOLDER = "CASTRA_EMULATOR_FOLDER"
_numbers = itertools.count(1)
_machines: dict[str, Machine] = {}
_layers: dict[str, list[Path]] = {}
"""Of each image that has a disk, uppermost first."""


@dataclass(frozen=True, slots=True)
class Published:
    """An image of somebody else's that is there in every region."""

    parameter: str
    """The parameter of the systems manager in which its id is published; "" where it has none."""
    name: str
    owner: str
    root_device: str = "/dev/xvda"


PUBLISHED = (
    Published(DEBIAN, "debian-12-amd64-20261109-2292", "136693071363"),
    Published("", "aws-parallelcluster-3.16.1-ubuntu-2404-lts-hvm-x86_64-202610290000", "247102896272", "/dev/sda1"),
    Published(
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261009",
        "898082745236",
        "/dev/sda1",
    ),
    Published(
        "/aws/service/eks/optimized-ami/1.34/amazon-linux-2023/x86_64/nvidia/recommended/image_id",
        "amazon-eks-node-al2023-x86_64-nvidia-1.34-v20261101",
        "602401143452",
    ),
)


def layers(image: str) -> list[Path]:
    """The disk of an image, uppermost layer first; [] if it has none. Making Debian's takes a minute or two, once."""
    if image == image_id(DEBIAN):
        return [debian.root()]
    return _layers.get(image, [])


def disks(_: Any) -> dict[str, list[str]]:
    """The page that tells the disks of all images, for guests of other processes."""
    return {image: [str(layer) for layer in found] for image, found in _layers.items()}


PAGES["/castra/disks"] = disks


@cache
def take_over() -> None:
    """Let moto's EC2 run machines."""
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.amis import AmiBackend
    from moto.ec2.models.instances import Instance

    _wrap(AmiBackend, "describe_images", before=_publish)
    if not machines.possible():
        return
    _wrap(EC2Backend, "run_instances", after=_launch)
    _wrap(AmiBackend, "create_image", after=_create_image)
    _wrap(AmiBackend, "copy_image", after=_copy_image)
    _wrap(AmiBackend, "deregister_image", after=_deregister_image)
    _wrap(Instance, "stop", before=lambda instance, *_: _with(instance, Machine.stop))
    _wrap(Instance, "start", before=lambda instance, *_: _with(instance, Machine.boot))
    _wrap(Instance, "terminate", before=_terminate)


@answers("ec2", "EnableImageDeprecation")
def enable_image_deprecation(call: Call) -> dict[str, Any]:
    """Say when an image is old; moto's answer is not XML."""
    from moto.ec2.models import ec2_backends

    backend = ec2_backends[memory.ACCOUNT][call.region]
    if call.told["ImageId"] not in backend.amis:
        raise Fault("InvalidAMIID.NotFound", f"The image id '[{call.told['ImageId']}]' does not exist")
    backend.amis[call.told["ImageId"]].deprecation_time = call.told["DeprecateAt"]
    return {"Return": True}


def _wrap(
    of: Any, name: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    """Do something before a method, told its arguments, or after it, told its answer and its arguments."""
    method = getattr(of, name)

    @wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args)
        answer = method(*args, **kwargs)
        if after:
            after(answer, *args, **kwargs)
        return answer

    setattr(of, name, both)


def _publish(backend: Any, *_: Any) -> None:
    """Put what others publish into a region's list of images."""
    from moto.ec2.models.amis import Ami

    for one in PUBLISHED:
        if (known_as := image_id(one.parameter or one.name)) not in backend.amis:
            backend.amis[known_as] = Ami(
                backend,
                known_as,
                name=one.name,
                owner_id=one.owner,
                public=True,
                architecture="x86_64",
                virtualization_type="hvm",
                root_device_type="ebs",
                root_device_name=one.root_device,
            )


def _launch(reservation: Any, backend: Any, *_: Any, **__: Any) -> None:
    """Boot the machines of instances that have just been recorded; Debian's disk may have to be made first."""
    for instance in reservation.instances:
        if instance.image_id != image_id(DEBIAN) and instance.image_id not in _layers:
            continue
        number = next(_numbers)
        address = f"127.77.{number // 250}.{number % 250 + 1}"
        card = instance.nics[0]
        card.private_ip_address = address
        card.private_ip_addresses[0]["PrivateIpAddress"] = address
        key = backend.key_pairs.get(instance.key_name)
        machine = _machines[instance.id] = Machine(
            instance.id,
            Path(tempfile.mkdtemp(prefix=f"{instance.id}-", dir=os.environ.get(FOLDER))),
            address,
            [],
            key.public_key.strip() if key else "",
            instance.user_data.decode() if instance.user_data else "",
            partial(_ended, instance),
        )
        threading.Thread(target=_boot, args=(machine, instance), daemon=True).start()


def _boot(machine: Machine, instance: Any) -> None:
    try:
        machine.layers = layers(instance.image_id)
        machine.boot()
    except (RuntimeError, OSError) as error:
        instance.terminate()
        instance.state_reason.code, instance.state_reason.message = "Server.InternalError", str(error)


def _ended(instance: Any) -> None:
    """What EC2 does with an instance that shuts itself down."""
    if instance.instance_initiated_shutdown_behavior == "terminate":
        instance.terminate()
    else:
        instance.stop()


def _terminate(instance: Any) -> None:
    if machine := _machines.pop(instance.id, None):
        machine.destroy()


def _with(instance: Any, do: Callable[[Machine], None]) -> None:
    if machine := _machines.get(instance.id):
        do(machine)


def _create_image(image: Any, _backend: Any, instance_id: str, *_: Any, **__: Any) -> None:
    image.root_device_type = "ebs"
    if machine := _machines.get(instance_id):
        machine.stop()  # as EC2 does unless it is told not to
        _layers[image.id] = machine.snapshot(Path(os.environ.get(FOLDER, tempfile.gettempdir())) / "images" / image.id)


def _copy_image(image: Any, _backend: Any, source_image_id: str, *_: Any, **__: Any) -> None:
    image.root_device_type = "ebs"
    if source_image_id in _layers:
        _layers[image.id] = _layers[source_image_id]


def _deregister_image(_none: Any, _backend: Any, image: str, *_: Any, **__: Any) -> None:
    """Forget an image, and those of its layers that nothing else is made of."""
    gone = _layers.pop(image, [])
    used = [*_layers.values(), *(machine.layers for machine in _machines.values())]
    for layer in gone[:-1]:  # the last is Debian's, which is everybody's
        if not any(layer in kept for kept in used):
            shutil.rmtree(layer, ignore_errors=True)
