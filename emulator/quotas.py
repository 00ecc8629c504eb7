"""Service Quotas: how much of a service an account may use. Generous unless the control page says otherwise.

POST /castra/quotas [{"code": "L-417A185B", "value": 96}]
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from clusters import catalog
from emulator import memory
from emulator.extension import Call, Fault, answers

GENEROUS = 10_000.0
EC2 = {
    "L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    "L-417A185B": "Running On-Demand P instances",
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-2C3B7624": "Running On-Demand Trn instances",
    "L-1945791B": "Running On-Demand Inf instances",
    "L-34B43A08": "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-6B0D517C": "All Trn Spot Instance Requests",
    "L-B5D1601B": "All Inf Spot Instance Requests",
}
"""Quotas in vCPUs, by code (EC2 user guide, on-demand and Spot limits)."""
OTHERS = {
    "vpc": {"L-F678F1CE": "VPCs per Region", "L-FE5A380F": "NAT gateways per Availability Zone"},
    "fsx": {"L-37E8E9B3": "Lustre Scratch_2 file systems", "L-7D03DBE2": "Lustre Persistent_2 file systems"},
}
SAGEMAKER = (
    *("training job usage", "training warm pool usage", "spot training job usage"),
    *("endpoint usage", "cluster usage"),
)
_set: dict[str, float] = {}


def add(told: Any) -> None:
    """Set one quota or a list of them, as JSON tells them; raises `ValueError` for what is none."""
    rows = told if isinstance(told, list) else [told]
    if any(not isinstance(row, Mapping) or set(row) != {"code", "value"} for row in rows):
        raise ValueError("a quota has code and value, no more")
    _set.update({row["code"]: float(row["value"]) for row in rows})


def listed() -> list[dict[str, Any]]:
    """The quotas that are not generous."""
    return [{"code": code, "value": value} for code, value in _set.items()]


def clear() -> None:
    """Be generous again."""
    _set.clear()


def value(name: str) -> float:
    """The quota of that name or code."""
    return _set.get(name, GENEROUS)


@answers("servicequotas", "GetServiceQuota")
def get(call: Call) -> dict[str, Any]:
    """One quota."""
    service, code = call.told.get("ServiceCode", ""), call.told.get("QuotaCode", "")
    return {"Quota": _quota(call, service, code, _named(service, code))}


@answers("servicequotas", "GetAWSDefaultServiceQuota")
def get_default(call: Call) -> dict[str, Any]:
    """One quota, as it is before anybody asks for more."""
    service, code = call.told.get("ServiceCode", ""), call.told.get("QuotaCode", "")
    return {"Quota": _quota(call, service, code, _named(service, code)) | {"Value": GENEROUS}}


@answers("servicequotas", "ListServiceQuotas")
def list_quotas(call: Call) -> dict[str, Any]:
    """The quotas of a service."""
    service = call.told.get("ServiceCode", "")
    return {"Quotas": [_quota(call, service, code, name) for code, name in _names(service).items()]}


def _named(service: str, code: str) -> str:
    if code not in (names := _names(service)):
        raise Fault("NoSuchResourceException", f"The request failed because the specified quota {code} does not exist.")
    return names[code]


def _names(service: str) -> dict[str, str]:
    return _sagemaker() if service == "sagemaker" else EC2 if service == "ec2" else OTHERS.get(service, {})


def _sagemaker() -> dict[str, str]:
    """SageMaker counts instances per type and use; the codes are made up, the names are its own."""
    names = [f"ml.{kind} for {use}" for kind in catalog.load() for use in SAGEMAKER]
    return {f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}": name for name in names}


def _quota(call: Call, service: str, code: str, name: str) -> dict[str, Any]:
    return {
        "ServiceCode": service,
        "QuotaArn": memory.arn("servicequotas", call.region, f"{service}/{code}"),
        "QuotaCode": code,
        "QuotaName": name,
        "Value": _set.get(code, _set.get(name, GENEROUS)),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }
