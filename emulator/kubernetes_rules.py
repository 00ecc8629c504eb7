"""What the API server of an emulated Kubernetes cluster takes from a client: strict, as `fieldValidation=Strict` is.

Core kinds are held against the schemas of Kubernetes itself where the package kubernetes-validate is installed, JobSets
against the structural schema of their definition; and both against some of the rules that no schema tells.
"""

import importlib
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from emulator.kubernetes_store import Kind, Object, Refusal, invalid

CRD = Path(__file__).with_name("jobset.json")
OLDEST = (1, 30)
"""Nobody runs what is older; moto's EKS says 1.19 unless told otherwise."""


def admit(told: Object, kind: Kind, namespace: str, version: str) -> Object:
    """A client's object, fit to be kept; raises `Refusal` as strict validation does."""
    if told.get("kind") != kind.name or told.get("apiVersion") != kind.api_version:
        raise Refusal(400, "BadRequest", f"the object is no {kind.api_version} {kind.name}")
    about = told.setdefault("metadata", {})
    if namespace and about.setdefault("namespace", namespace) != namespace:
        raise Refusal(400, "BadRequest", "the namespace of the object does not match the namespace of the request")
    name = about.get("name") or f"{about.get('generateName', '')}x"
    if len(name) > 253 or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        raise invalid(told, f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of …')
    for key, value in (about.get("labels") or {}).items():
        if not re.fullmatch(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", value):
            raise invalid(told, f'metadata.labels: Invalid value: "{value}" of {key}')
    if kind.name == "JobSet":
        _fits(told, crd())
        for one in told["spec"].get("replicatedJobs", []):
            _check_job(told, one["template"]["spec"], f"{name}-{one['name']}-{one.get('replicas', 1) - 1}", "-abcde")
    elif importlib.util.find_spec("kubernetes_validate"):
        _core(told, version)
    if kind.name == "Job":
        _check_job(told, told["spec"], name)
    return told


@cache
def crd() -> Object:
    """JobSet's structural schema, in which what is not known is an error, as strict validation has it."""
    told: Object = _strict(json.loads(CRD.read_text()))
    return told


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: _strict(value) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        told.setdefault("additionalProperties", False)
    return told


def _fits(told: Object, schema: Object) -> None:
    import jsonschema

    for error in jsonschema.Draft202012Validator(schema).iter_errors(told):
        where = ".".join(map(str, error.absolute_path))
        raise Refusal(400, "BadRequest", f"strict decoding error: {where}: {error.message[:300]}")


def _core(told: Object, version: str) -> None:
    schemas: Any = importlib.import_module("kubernetes_validate")
    try:
        schemas.validate(told, version, strict=True)
    except schemas.ValidationError as error:
        where = ".".join(map(str, error.path))
        raise Refusal(400, "BadRequest", f"strict decoding error: {where}: {error.message[:300]}") from error
    except schemas.SchemaNotFoundError as error:
        raise Refusal(400, "BadRequest", error.message) from error


def _check_job(of: Object, spec: Object, name: str, tail: str = "") -> None:
    """What the API asks of an indexed Job beyond its fields."""
    longest = f"{name}-{spec.get('completions', 1) - 1}{tail}"
    if spec.get("completionMode") == "Indexed" and len(longest) > 63:
        raise invalid(of, f'metadata.name: Invalid value: "{longest}": must be no more than 63 characters')
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        raise invalid(of, 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"')
    if "podFailurePolicy" not in spec:
        return
    if pod["restartPolicy"] != "Never":
        raise invalid(of, 'spec.template.spec.restartPolicy: only "Never" is supported when podFailurePolicy is given')
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        raise invalid(of, 'spec.podReplacementPolicy: Unsupported value: supported values: "Failed"')
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {})
        if codes.get("operator") == "In" and 0 in codes["values"]:
            raise invalid(of, "spec.podFailurePolicy.rules: Invalid value: 0: must not be 0 for the In operator")
        if codes.get("values", []) != sorted(set(codes.get("values", []))):
            raise invalid(of, "spec.podFailurePolicy.rules: Invalid value: must be ordered and without duplicates")
