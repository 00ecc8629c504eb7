"""Which export is in use: promoted once, kept with a reason, rolled back, and never by two at once."""

from pathlib import Path

import pytest

from store import StoreError, open_store
from tasks import promotion
from tasks.promotion import Model


def model(number: int) -> Model:
    return Model(f"preprocess/m@{number}", f"train/m@{number}", f"export/m@{number}", 2.0, promotion.now())


def test_the_newest_promoted_model_is_in_use(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    promotion.promote(store, "m", model(1), "first")
    promotion.promote(store, "m", model(2), "better")
    record = promotion.read(store, "m")
    assert record.current == model(2) or (record.current and record.current.export == "export/m@2")
    assert record.reason == "better"


def test_promoting_what_is_in_use_changes_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    first = promotion.promote(store, "m", model(1), "first")
    assert promotion.promote(store, "m", model(1), "again") == first


def test_rolling_back_returns_to_the_model_before(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    promotion.promote(store, "m", model(1), "first")
    promotion.promote(store, "m", model(2), "better")
    back = promotion.roll_back(store, "m")
    assert back.current is not None
    assert back.current.export == "export/m@1"
    with pytest.raises(StoreError, match="nothing to go back to"):
        promotion.roll_back(store, "m")


def test_keeping_notes_why(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    promotion.promote(store, "m", model(1), "first")
    kept = promotion.keep(store, "m", "kept: no gain")
    assert kept.reason == "kept: no gain"
    assert kept.current is not None


def test_a_place_is_read_back_from_its_key() -> None:
    place = promotion.place("train/my-model@0123456789ab")
    assert (place.step, place.name, place.fingerprint) == ("train", "my-model", "0123456789ab")
    assert place.key == "train/my-model@0123456789ab"
