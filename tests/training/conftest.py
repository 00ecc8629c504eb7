"""What the tests of training share: forked ranks, a small dataset, and one finished run per strategy."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters.yard import wait_until
from tests.sky import emulator, site
from tests.training.hosts import Hosts
from tests.training.nursery import Nursery, spec, write_dataset, write_job

__all__ = ["emulator", "site"]

Trained = Callable[[str], Path]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Ranks that start in milliseconds."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training set of 96 sequences."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="session")
def trained(nursery: Nursery, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the output of an uninterrupted run of six steps: `single`, or a strategy on two ranks."""
    finished: dict[str, Path] = {}

    def run(strategy: str) -> Path:
        if strategy not in finished:
            folder = tmp_path_factory.mktemp(strategy)
            alone = strategy == "single"
            plan = spec("ddp", micro=8) if alone else spec(strategy, micro=2)
            codes, ranks = nursery.run(write_job(folder, plan, dataset=dataset), 1 if alone else 2)
            assert set(codes) == {0}, ranks.log.read_text()
            finished[strategy] = folder / "out"
        return finished[strategy]

    return run


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Nodes on this machine, none of whose processes may be left."""
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()
    wait_until(lambda: not hosts.yard.processes(), 10)
