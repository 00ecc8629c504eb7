"""Where images and containers are baked in tests: an emulated AWS and a Prefect server for all tests of a file."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from clusters import keeper
from emulator import aws as emulated
from emulator.aws import Emulator
from tests.camp import Camp


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Emulator, dict[str, str]]]:
    """An emulator and a Prefect server for all tests here, and the environment that leads to them."""
    from rich.console import Console

    from flows._server import embedded

    folder = tmp_path_factory.mktemp("sky")
    os.environ["CASTRA_STATE"] = str(folder)
    try:
        with emulated.running(folder) as aws, embedded(keeper.free_port(), Console(quiet=True)) as url:
            yield aws, emulated.environment(aws.endpoint) | {"PREFECT_API_URL": f"{url}/api"}
    finally:
        del os.environ["CASTRA_STATE"]


@pytest.fixture
def camp(user_camp: Camp, sky: tuple[Emulator, dict[str, str]]) -> Camp:
    user_camp.env |= sky[1] | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return user_camp


class Watch(threading.Thread):
    """Looks for a secret while a build goes on: among the words of every process, and in the files of the build."""

    def __init__(self, secret: str, camp: Camp) -> None:
        super().__init__(daemon=True)
        self.secret, self.camp = secret.encode(), camp
        self.seen: set[str] = set()
        """Where it was: names of files, words of processes."""
        self.rounds, self.over = 0, threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()
        assert self.rounds > 10

    def run(self) -> None:
        deeper = ("*", "packer/*", "tmp/*", "tmp/*/*", "tmp/*/*/*", "tmp/*/*/*/*", "tmp/*/*/*/*/*")
        places = [f".castra/images/*/{more}" for more in deeper]  # not podman's layers
        while not self.over.wait(0.05):
            self._look(Path("/proc"), "[0-9]*/cmdline")
            for place in places:
                self._look(self.camp.folder, place)
            self.rounds += 1

    def _look(self, folder: Path, place: str) -> None:
        """Read what is there; a process or a folder that goes meanwhile has nothing to tell any more."""
        with contextlib.suppress(OSError):
            for path in folder.glob(place):
                with contextlib.suppress(OSError):
                    if self.secret in (told := path.read_bytes()):
                        self.seen.add(told.decode(errors="replace") if path.name == "cmdline" else path.name)
