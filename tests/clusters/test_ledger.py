"""The ledger, the inventory, and the end of everything we made."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier, Thread

import pytest

from clusters import ledger
from clusters.aws import Site, here
from clusters.base import ClusterError, Refused, Unreachable
from clusters.inventory import Row, inventory, reap, teardown
from clusters.ledger import Claim, Entry
from clusters.local import LocalCluster
from clusters.stacks import camp, deploy, watch
from emulator import aws as emulated
from store import Store, open_store
from tests.clusters.gallery import camp_stack
from tests.clusters.yard import Yard, finished, ready

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def announce(store: Store, run: str, site: Site, expires: datetime = NOW + HOUR, *, keep: bool = False) -> Entry:
    return ledger.intend(store, Claim(run, expires, keep=keep), "stack", camp.name(run), asdict(site))


def stand(store: Store, run: str, site: Site, expires: datetime = NOW + HOUR, *, keep: bool = False) -> Entry:
    """A small stack that stands, and its entry."""
    entry = announce(store, run, site, expires, keep=keep)
    part = {"G": {"Type": "AWS::Logs::LogGroup", "Properties": {}}}
    stack = deploy.Stack(entry.name, {"Resources": part}, entry.tags, site)
    list(deploy.apply(deploy.propose(stack), entry.token))
    return ledger.created(store, entry, entry.name)


def silent(_: str) -> None:
    """Where what is told goes."""


def names(rows: list[Row]) -> set[str]:
    return {row.name for row in rows}


def test_an_entry_goes_from_intent_to_gone(store: Store, site: Site) -> None:
    entry = announce(store, "r", site)
    assert (entry.state, entry.run, entry.owner) == ("intent", "r", ledger.owner())
    assert announce(store, "r", site, NOW + 9 * HOUR) == entry, "an open entry keeps its token and its expiry"
    assert ledger.open_entries(store, "r") == [entry]
    made = ledger.created(store, entry, "arn:1")
    assert (made.state, made.id, made.token) == ("created", "arn:1", entry.token)
    assert ledger.gone(store, made).state == "gone"
    assert ledger.open_entries(store) == []
    assert announce(store, "r", site).token != entry.token, "what is made anew is another request"


def test_entries_of_another_run_are_another_matter(store: Store, site: Site) -> None:
    first, second = announce(store, "r", site), announce(store, "r2", site)
    assert ledger.open_entries(store, "r") == [first]
    assert ledger.open_entries(store) == [first, second]


def test_of_two_intents_at_the_same_moment_one_counts(store: Store, site: Site) -> None:
    start, made = Barrier(8), list[Entry]()

    def intend() -> None:
        start.wait()
        made.append(announce(store, "r", site))

    threads = [Thread(target=intend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({entry.token for entry in made}) == 1


def test_one_name_in_two_places_is_refused(store: Store, site: Site) -> None:
    announce(store, "r", Site("us-west-2", site.endpoint, site.memory))
    with pytest.raises(Refused, match=r"stack castra-r-camp of run r is in us-west-2 .*: tear that run down first"):
        announce(store, "r", site)


def test_only_what_is_due_is_expired(store: Store, site: Site) -> None:
    old = announce(store, "old", site, NOW - HOUR)
    announce(store, "new", site)
    assert ledger.expired(store, NOW) == [old]


def test_teardown_leaves_an_empty_inventory(store: Store, site: Site) -> None:
    entry = stand(store, "whole", site)
    (row,) = inventory(store, "whole", site)
    assert (row.name, row.state, row.kept, row.owner) == (entry.name, "CREATE_COMPLETE", False, ledger.owner())
    told: list[str] = []
    assert teardown(store, "whole", site, told.append) == []
    assert told == [f"stack {entry.name}: deleted with 1 resources"]
    assert watch.look(entry.name, site) is None
    assert teardown(store, "whole", site, silent) == []


def test_an_intent_that_came_to_nothing_is_closed_after_looking(store: Store, site: Site) -> None:
    entry = announce(store, "nothing", site)
    assert [row.state for row in inventory(store, "nothing")] == ["missing"]
    assert teardown(store, "nothing", tell=silent) == []
    assert [one.state for one in ledger.entries(store, "nothing")] == ["gone"]
    assert entry.name not in names(inventory(store, None, site))


def test_a_change_set_that_was_never_executed_is_taken_down(store: Store, site: Site) -> None:
    entry = announce(store, "review", site)
    deploy.propose(camp_stack(entry))
    assert [row.state for row in inventory(store, "review")] == ["REVIEW_IN_PROGRESS"]
    assert teardown(store, "review", site, silent) == []
    assert watch.look(entry.name, site) is None


def test_what_a_lost_ledger_does_not_know_is_found_by_its_tags(store: Store, site: Site, tmp_path: Path) -> None:
    entry = stand(open_store(str(tmp_path / "lost")), "stray", site)
    assert names(inventory(store, "stray", site)) == {entry.name}
    assert inventory(store, "another", site) == []
    assert teardown(store, "stray", site, silent) == []
    assert watch.look(entry.name, site) is None


def test_what_is_kept_stays_until_it_expires(store: Store, site: Site) -> None:
    entry = stand(store, "kept", site, NOW + HOUR, keep=True)
    (row,) = teardown(store, "kept", site, silent)
    assert (row.name, row.kept) == (entry.name, True)
    rows = reap(store, NOW, site, silent)
    assert entry.name in names(rows)
    assert entry.name not in names(reap(store, NOW + 2 * HOUR, site, silent))
    assert watch.look(entry.name, site) is None


def test_the_reaper_takes_what_has_expired_and_nothing_else(store: Store, site: Site, tmp_path: Path) -> None:
    due, fresh = stand(store, "due", site, NOW - HOUR), stand(store, "fresh", site)
    stray = stand(open_store(str(tmp_path / "lost")), "stray-due", site, NOW - HOUR)
    assert names(reap(store, NOW, site, silent)) >= {fresh.name}
    assert [watch.look(entry.name, site) is None for entry in (due, fresh, stray)] == [True, False, True]
    teardown(store, "fresh", site, silent)


def test_what_is_not_ours_is_neither_listed_nor_touched(
    store: Store, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTRA_OWNER", "mallory")
    theirs = stand(store, "theirs", site, NOW - HOUR)
    monkeypatch.delenv("CASTRA_OWNER")
    assert theirs.name not in names(inventory(store, None, site))
    teardown(store, "theirs", site, silent)
    reap(store, NOW, site, silent)
    assert watch.look(theirs.name, site)
    monkeypatch.setenv("CASTRA_OWNER", "mallory")
    assert teardown(store, "theirs", site, silent) == []


def test_an_emulator_that_died_took_its_stacks_along(store: Store, tmp_path: Path) -> None:
    with emulated.running(tmp_path) as mortal, pytest.MonkeyPatch.context() as patch:
        for name, value in emulated.environment(mortal.endpoint).items():
            patch.setenv(name, value)
        site = here()
        announce(store, "mortal", site)
    assert [row.state for row in inventory(store, "mortal")] == ["missing"]
    told: list[str] = []
    assert teardown(store, "mortal", tell=told.append) == []
    assert told == ["stack castra-mortal-camp: gone together with its emulator"]


def test_a_new_emulator_takes_over_the_name_of_one_that_died(store: Store, site: Site) -> None:
    dead = Site(site.region, "http://127.0.0.1:9", "dead")
    old = announce(store, "phoenix", dead)
    new = announce(store, "phoenix", site)
    assert (new.where["endpoint"], new.token == old.token) == (site.endpoint, False)


def test_a_site_that_does_not_answer_keeps_its_entries_open(store: Store, site: Site) -> None:
    away = announce(store, "away", Site(site.region, "http://127.0.0.1:9"))
    near = stand(store, "near", site)
    with pytest.raises(Unreachable, match=r"^stack castra-away-camp: AWS in .* does not answer; check the network"):
        teardown(store, None, site, silent)
    assert ledger.open_entries(store) == [away], "everything else was taken down"
    assert watch.look(near.name, site) is None
    with pytest.raises(Unreachable):
        inventory(store, "away")


def test_a_running_job_is_cancelled_before_the_stacks_go(store: Store, site: Site, yard: Yard) -> None:
    cluster = LocalCluster(yard.folder / "jobs", grace_s=0.5)
    stand(store, "busy", site)
    where = {"cluster": "local", "workdir": str(cluster.workdir)}
    entry = ledger.intend(store, Claim("busy", NOW + HOUR), "job", "train-1", where)
    job_id = cluster.submit(yard.job("train-1", deaf=True, sleep=600))
    ledger.created(store, entry, job_id)
    ready(cluster, job_id)
    assert sorted(row.state for row in inventory(store, "busy")) == ["CREATE_COMPLETE", "running"]
    told: list[str] = []
    assert teardown(store, "busy", site, told.append) == []
    assert told == ["job train-1: cancelled", "stack castra-busy-camp: deleted with 1 resources"]
    assert finished(cluster, job_id).state == "cancelled"


def test_a_job_whose_cluster_was_deleted_is_gone_with_it(store: Store, site: Site) -> None:
    where = {"cluster": "eks", "region": site.region, "endpoint": site.endpoint, "memory": site.memory}
    entry = ledger.intend(store, Claim("razed", NOW + HOUR), "job", "train-1", where | {"Cluster": "was-deleted"})
    ledger.created(store, entry, "train-1")
    told: list[str] = []
    assert teardown(store, "razed", site, told.append) == []
    assert told == ["job train-1: gone together with its cluster"]


def test_a_job_of_an_unknown_cluster_is_one_sentence(store: Store) -> None:
    ledger.intend(store, Claim("odd", NOW + HOUR), "job", "j", {"cluster": "mainframe", "kubeconfig": "here"})
    with pytest.raises(ClusterError, match="of kind 'mainframe' is not known"):
        teardown(store, "odd", tell=silent)
