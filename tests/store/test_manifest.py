"""Manifests: a result is there when, and only when, its manifest and every file of it are."""

from store import Store
from store.manifest import Manifest, Place, fingerprint, read_manifest, seal

PLACE = Place("train", "tiny", "0123456789ab")


def test_a_result_is_done_when_its_manifest_is_there(store: Store) -> None:
    folder = store.workspace(PLACE.key)
    (folder / "weights").write_bytes(b"w" * 10)
    store.publish(PLACE.key)
    assert read_manifest(store, PLACE) is None
    sealed = seal(store, PLACE, Manifest("train", "tiny", PLACE.fingerprint, {"steps": 3}, facts={"loss": 1.5}))
    assert sealed.files == {"weights": 10}
    assert read_manifest(store, PLACE) == sealed
    assert sealed.key == PLACE.key == "train/tiny@0123456789ab"


def test_a_result_that_lost_a_file_is_not_done(store: Store) -> None:
    for name in ("a", "b"):
        (store.workspace(PLACE.key) / name).write_text(name)
    store.publish(PLACE.key)
    seal(store, PLACE, Manifest("train", "tiny", PLACE.fingerprint, {}))
    store.delete(f"{PLACE.key}/b")
    assert read_manifest(store, PLACE) is None


def test_hidden_files_are_not_part_of_a_result(store: Store) -> None:
    (store.workspace(PLACE.key) / ".weights.123").write_text("half")
    store.publish(PLACE.key)
    assert seal(store, PLACE, Manifest("train", "tiny", PLACE.fingerprint, {})).files == {}
    assert store.keys(PLACE.key) == [f"{PLACE.key}/manifest.json"]
    assert read_manifest(store, PLACE)


def test_the_fingerprint_depends_on_what_is_said_and_not_on_the_order() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert len(fingerprint({})) == 12
