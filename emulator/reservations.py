"""EC2's capacity reservations, capacity blocks among them: filled by the control page, by the API or by a stack.

    POST /castra/reservations [{"id": "cr-0123456789abcdef0", "type": "p5.48xlarge", "zone": "us-east-1a", "count": 4,
                                "start": "2026-11-20T12:00:00Z", "end": "2026-11-21T11:30:00Z", "block": true}]

A reservation with a start or an end is scheduled, active or expired by the clock; one without is active.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from emulator import memory
from emulator.ec2 import answer, filtered, query_list, query_tags
from emulator.extension import Call, Fault, answers

KIND = "capacity reservation"
CONTROL = {"id", "type", "zone", "count", "available", "start", "end", "state", "block", "region"}
MISSING = "InvalidCapacityReservationId.NotFound"


def add(told: Any) -> None:
    """Take one reservation or a list of them, as JSON tells them; raises `ValueError` for what is none."""
    for row in told if isinstance(told, list) else [told]:
        if not isinstance(row, Mapping) or not {"type", "zone"} <= set(row) <= CONTROL:
            raise ValueError(f"not a reservation: {row!r}; it has {', '.join(sorted(CONTROL))}, type and zone always")
        region = row.get("region") or row["zone"].rstrip("abcdef")
        made = _made(region, row["type"], row["zone"], int(row.get("count", 1)), row.get("id", ""))
        made["ReservationType"] = "capacity-block" if row.get("block") else "default"
        made["AvailableInstanceCount"] = int(row.get("available", made["TotalInstanceCount"]))
        made |= {to: _time(row[key]) for key, to in (("start", "StartDate"), ("end", "EndDate")) if row.get(key)}
        made |= {"EndDateType": "limited"} if row.get("end") else {}
        made |= {"Forced": row["state"]} if "state" in row else {}


def listed() -> list[dict[str, Any]]:
    """All reservations, as EC2 tells them."""
    return [_told(row) for row in memory.everywhere(KIND).values()]


def clear() -> None:
    """Forget all."""
    for row in list(memory.everywhere(KIND).values()):
        memory.table(KIND, row["Region"]).pop(row["CapacityReservationId"])


def find(reservation: str) -> dict[str, Any] | None:
    """The reservation of that id, as EC2 tells it."""
    row = memory.everywhere(KIND).get(reservation)
    return _told(row) if row else None


def unusable(reservation: str, instance_type: str, zone: str) -> str | None:
    """Why no instance of this type can start in a reservation, in AWS's words; None if one can."""
    row = find(reservation)
    if row is None:
        return f"{MISSING}: The capacity reservation '{reservation}' does not exist"
    if row["State"] != "active":
        return f"InvalidCapacityReservationState: The capacity reservation '{reservation}' is {row['State']}"
    if (row["InstanceType"], row["AvailabilityZone"]) != (instance_type, zone):
        there = f"{row['InstanceType']} in {row['AvailabilityZone']}"
        return f"InvalidParameterCombination: '{reservation}' is for {there}, not for {instance_type} in {zone}"
    if row["AvailableInstanceCount"] < 1:
        return f"ReservationCapacityExceeded: The requested reservation '{reservation}' has no capacity left"
    return None


@answers("ec2", "DescribeCapacityReservations")
def describe(call: Call) -> dict[str, Any]:
    """The reservations of a region; an id that does not exist is an error."""
    wanted = query_list(call, "CapacityReservationId")
    rows = memory.table(KIND, call.region)
    if missing := [one for one in wanted if one not in rows]:
        raise Fault(MISSING, f"The capacity reservation '{missing[0]}' does not exist")
    found = [_told(row) for key, row in rows.items() if not wanted or key in wanted]
    return answer(call, {"CapacityReservations": filtered(call, found)})


@answers("ec2", "CreateCapacityReservation")
def create(call: Call) -> dict[str, Any]:
    """A reservation on demand, active at once, unless there is no capacity."""
    from emulator import faults

    told = call.told
    kind, zone = told["InstanceType"], told.get("AvailabilityZone", f"{call.region}a")
    if why := faults.no_capacity(kind, zone, "on-demand"):
        code, _, message = why.partition(": ")
        raise Fault(code, message)
    made = _made(call.region, kind, zone, int(told["InstanceCount"]))
    made["Tags"] = query_tags(call)
    if "EndDate" in told:
        made |= {"EndDate": _time(told["EndDate"]), "EndDateType": "limited"}
    return answer(call, {"CapacityReservation": _told(made)})


@answers("ec2", "ModifyCapacityReservation")
def modify(call: Call) -> dict[str, Any]:
    """Another count or another end."""
    row = _row(call)
    if "InstanceCount" in call.told:
        row["TotalInstanceCount"] = row["AvailableInstanceCount"] = int(call.told["InstanceCount"])
    if "EndDate" in call.told:
        row |= {"EndDate": _time(call.told["EndDate"]), "EndDateType": "limited"}
    return answer(call, {"Return": True})


@answers("ec2", "CancelCapacityReservation")
def cancel(call: Call) -> dict[str, Any]:
    """End it: it can still be seen."""
    _row(call)["Forced"] = "cancelled"
    return answer(call, {"Return": True})


@answers("ec2", "DescribeCapacityBlockOfferings")
def offerings(call: Call) -> dict[str, Any]:
    """One offering, for tomorrow, at the price on demand; blocks come in whole days up to 14, then weeks up to 182."""
    from clusters import catalog

    told = call.told
    kind, hours, count = told.get("InstanceType", ""), int(told.get("CapacityDurationHours", 24)), told["InstanceCount"]
    known = catalog.load().get(kind)
    if known is None or "capacity-block" not in known.capacity or hours % 24 or hours > 182 * 24:
        return answer(call, {"CapacityBlockOfferings": []})
    noon = datetime.now(UTC).replace(hour=11, minute=30, second=0, microsecond=0) + timedelta(days=1)
    price = (known.price_usd_per_hour or 0.0) * hours * int(count)
    row = {
        "CapacityBlockOfferingId": memory.new_id("cb"),
        "InstanceType": kind,
        "AvailabilityZone": f"{call.region}a",
        "InstanceCount": int(count),
        "StartDate": noon,
        "EndDate": noon + timedelta(hours=hours),
        "CapacityBlockDurationHours": hours,
        "UpfrontFee": f"{price:.2f}",
        "CurrencyCode": "USD",
        "Tenancy": "default",
    }
    return answer(call, {"CapacityBlockOfferings": [row]})


def _made(region: str, kind: str, zone: str, count: int, known_as: str = "") -> dict[str, Any]:
    name = known_as or memory.new_id("cr")
    row = {
        "Region": region,
        "CapacityReservationId": name,
        "OwnerId": memory.ACCOUNT,
        "CapacityReservationArn": memory.arn("ec2", region, f"capacity-reservation/{name}"),
        "InstanceType": kind,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": zone,
        "Tenancy": "default",
        "TotalInstanceCount": count,
        "AvailableInstanceCount": count,
        "EndDateType": "unlimited",
        "InstanceMatchCriteria": "targeted",
        "CreateDate": datetime.now(UTC),
        "ReservationType": "default",
        "Tags": [],
    }
    with memory.lock:
        memory.table(KIND, region)[name] = row
    return row


def _told(row: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC)
    state = "scheduled" if row.get("StartDate", now) > now else "expired" if row.get("EndDate", now) < now else "active"
    told = {key: value for key, value in row.items() if key not in ("Forced", "Region")}
    return told | {"State": row.get("Forced", state)}


def _row(call: Call) -> dict[str, Any]:
    name = call.told.get("CapacityReservationId", "")
    if name not in (rows := memory.table(KIND, call.region)):
        raise Fault(MISSING, f"The capacity reservation '{name}' does not exist")
    return rows[name]


def _time(text: Any) -> datetime:
    moment = datetime.fromisoformat(str(text))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
