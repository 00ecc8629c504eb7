"""SageMaker's endpoints beside moto's: today's instance types, and UpdateEndpoint."""

from functools import cache
from typing import Any

from emulator import memory
from emulator.extension import Call, Fault, answers


@answers("sagemaker", "UpdateEndpoint")
def update_endpoint(call: Call) -> dict[str, Any]:
    """Let an endpoint serve another configuration, at once."""
    from moto.sagemaker.models import sagemaker_backends

    backend = sagemaker_backends[memory.ACCOUNT][call.region]
    found = backend.endpoints.get(call.told["EndpointName"])
    config = backend.endpoint_configs.get(call.told["EndpointConfigName"])
    if found is None or config is None:
        what = "endpoint" if found is None else "endpoint configuration"
        raise Fault("ValidationException", f"Could not find {what}.")
    found.endpoint_config_name = config.endpoint_config_name
    found.production_variants = found._process_production_variants(config.production_variants)
    return {"EndpointArn": found.arn}


@cache
def know_instances() -> None:
    """Replace moto's list of instance types, which ends before p4d, by the one of the API."""
    from botocore.loaders import Loader
    from moto.sagemaker import exceptions, models

    shapes = Loader().load_service_model("sagemaker", "service-2")["shapes"]
    known = frozenset(shapes["ProductionVariantInstanceType"]["enum"])

    def check(_: Any, kind: str) -> None:
        if kind not in known:
            told = "failed to satisfy constraint: Member must satisfy enum value set: the types of the API"
            raise exceptions.ValidationError(message=f"Value '{kind}' at 'instanceType' {told}")

    models.FakeEndpointConfig.validate_instance_type = check
