"""The emulator's program: moto's server on 127.0.0.1 with our CloudFormation in place of moto's.

python -m emulator.server 4566
CASTRA_EMULATOR_PACE_S=0.5 python -m emulator.server 4566      # every change of a resource takes that long

Everything is in memory and ends with the process; `GET /castra/emulator` names this memory.
"""

import contextlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from emulator import bulk, control, endpoints, extension, hosts, kubernetes, launches

PATH = "/castra/emulator"
MEMORY = secrets.token_hex(8)


CONDITIONS = {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}
ANSWERING = ("batch_jobs", "eks", "fsx", "hyperpod", "images", "pcluster", "pcs", "prices", "registry", "sagemaker")
"""Modules of ours that answer in place of moto; they register themselves."""
CHANGES: Mapping[str, tuple[Callable[[], None], ...]] = {
    "sagemaker": (endpoints.know_instances,),
    "ec2": (launches.take_over, hosts.take_over),
    "s3": (bulk.take_over,),
}
"""What changes moto, before a service's first request; each does so once."""
WARM = ("s3", "iam", "logs", "ec2")
"""Services whose import takes long: done in the background while the server answers already."""


class Application:
    """The WSGI application: our own page, our CloudFormation, and moto for everything else."""

    def __init__(self) -> None:
        from flask import Flask
        from moto.core.utils import convert_to_flask_response
        from moto.moto_server.werkzeug_app import BackendRequest, DomainDispatcherApplication, create_backend_app

        from emulator.api import StackApi

        self.moto = DomainDispatcherApplication(create_backend_app)
        self.conditional, self.changing = threading.Lock(), threading.Lock()
        self.stacks = Flask("stacks")
        self.stacks.request_class = BackendRequest
        self.stacks.add_url_rule("/", "stacks", convert_to_flask_response(StackApi.dispatch), methods=["POST"])

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        if environ.get("PATH_INFO") == PATH:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"memory": MEMORY}).encode()]
        if (page := extension.page(environ, start_response)) is not None:
            return page
        if environ.get("PATH_INFO", "").startswith(control.PREFIX):
            return control.page(environ, start_response)
        return control.attended(self._answer, environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO", "").startswith(kubernetes.PREFIX):
            return kubernetes.application(environ, start_response)
        service = extension.signed_for(environ)[0]
        if (call := extension.understood(environ)) is not None:
            return extension.respond(call, start_response)
        with self.changing:  # of two first requests at once each would change moto, and every machine be made twice
            for take_over in CHANGES.get(service, ()):
                take_over()
        if service == "s3" and (answer := bulk.read(self.moto, environ, start_response)) is not None:
            return answer
        application = self.stacks if service == "cloudformation" else self.moto
        # moto compares and writes in two steps: without the lock two conditional writes could both succeed
        with self.conditional if CONDITIONS & environ.keys() else contextlib.nullcontext():
            return application(environ, start_response)


def warm() -> None:
    """Import what the first requests will need."""
    from moto.backends import get_backend

    from emulator.world import World

    here = World.region(os.environ.get("AWS_REGION", "us-east-1"))
    for service in WARM:
        get_backend(service)
        getattr(here.services, service)


def main(port: int) -> None:
    """Serve until the end."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    from emulator.world import World

    for name in ANSWERING:
        import_module(f"emulator.{name}")
    World.endpoint = f"http://127.0.0.1:{port}"
    World.pace_s = float(os.environ.get("CASTRA_EMULATOR_PACE_S", "0"))
    MotoRequestHandler.log_request = lambda *_: None
    server = make_server("127.0.0.1", port, Application(), threaded=True, request_handler=MotoRequestHandler)
    print(f"the emulator listens on {World.endpoint}", flush=True)
    threading.Thread(target=warm, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
