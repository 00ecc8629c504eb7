"""The parameters in which AWS publishes its machine images: moto has some, the others are made up from their names."""

import hashlib
import time
from typing import Any

from emulator import memory
from emulator.extension import Call, Fault, answers

PUBLIC = "/aws/service/"
DEBIAN = "/aws/service/debian/release/12/latest/amd64"
"""The one image whose instances are machines, see `emulator.launches`."""
MOTOS = tuple(PUBLIC + name for name in ("ami-amazon-linux-latest", "ecs/", "global-infrastructure/"))


@answers("ssm", "GetParameter")
def get_parameter(call: Call) -> dict[str, Any]:
    """One parameter."""
    found = _parameter(call, call.told["Name"])
    if found is None:
        raise Fault("ParameterNotFound", f"Parameter {call.told['Name']} not found.")
    return {"Parameter": found}


@answers("ssm", "GetParameters")
def get_parameters(call: Call) -> dict[str, Any]:
    """Those of the parameters that exist, and the names of the others."""
    rows = {name: _parameter(call, name) for name in call.told["Names"]}
    return {
        "Parameters": [row for row in rows.values() if row],
        "InvalidParameters": [name for name, row in rows.items() if row is None],
    }


def _parameter(call: Call, name: str) -> dict[str, Any] | None:
    from moto.ssm.models import ssm_backends

    if name.startswith(PUBLIC) and not name.startswith(MOTOS):
        return _image(name)
    found = ssm_backends[memory.ACCOUNT][call.region].get_parameter(name)
    return found.response_object(bool(call.told.get("WithDecryption")), call.region) if found else None


def image_id(name: str) -> str:
    """The id of a published image, made up from its name: the same each time."""
    return f"ami-{hashlib.sha256(name.encode()).hexdigest()[:17]}"


def _image(name: str) -> dict[str, Any] | None:
    """An image that is there for every name that sounds like one."""
    if name != DEBIAN and not any(word in name for word in ("ami", "image")):
        return None
    value = image_id(name)
    kind = {"Type": "String", "DataType": "aws:ec2:image", "Version": 1, "LastModifiedDate": time.time()}
    return {"Name": name, "Value": value, "ARN": f"arn:aws:ssm:::parameter{name}", **kind}
