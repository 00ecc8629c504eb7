"""The price list of EC2, from the same table as the bills of Castra: `clusters/instances.json`."""

import json
from typing import Any

from clusters import catalog
from clusters.catalog import Instance
from emulator.extension import Call, answers


@answers("pricing", "GetProducts")
def get_products(call: Call) -> dict[str, Any]:
    """What instance types cost on demand with Linux, where a price is known; `Filters` on the attributes are obeyed."""
    wanted = {row["Field"]: row["Value"] for row in call.told.get("Filters", []) if row.get("Type") == "TERM_MATCH"}
    products = [_product(one) for one in catalog.load().values() if one.price_usd_per_hour is not None]
    found = [one for one in products if all(one["product"]["attributes"].get(key) == to for key, to in wanted.items())]
    ours = call.told.get("ServiceCode") == "AmazonEC2"
    return {"FormatVersion": "aws_v1", "PriceList": [json.dumps(one) for one in found] if ours else []}


def _product(one: Instance) -> dict[str, Any]:
    price = {"unit": "Hrs", "pricePerUnit": {"USD": f"{one.price_usd_per_hour:.10f}"}}
    attributes = {
        "instanceType": one.name,
        "regionCode": one.price_region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
        "vcpu": str(one.vcpus),
    }
    return {
        "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": one.name.upper()},
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {"term": {"priceDimensions": {"rate": price}}}},
        "publicationDate": one.price_as_of,
    }
