"""Data sets of a Hugging Face Hub, or in its folder format, by the optional library `datasets`."""

import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from training.data.sources import HUB, Document, SourceError

ROWS: Final = 1000
"""Rows asked for at once."""


def dataset(source: str) -> Document:
    """Return hf://name[:split] as a document whose size is its rows. Raises SourceError."""
    opened = load(source)
    told = f"{len(opened)} {sorted(opened.column_names)} {opened.info.version} {opened.info.dataset_size}"
    checksums = sorted(opened.info.download_checksums or ())
    return Document(source.removeprefix(HUB), source, len(opened), source, f"{told} {checksums}")


def columns(source: str) -> list[str]:
    """Return the names of a data set's columns. Raises SourceError."""
    return list(load(source).column_names)


def rows(source: str, wanted: list[str], start: int, end: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows from `start` up to `end`, some at a time, with these columns. Raises SourceError."""
    chosen = load(source).select_columns(wanted)
    for begin in range(start, end, ROWS):
        yield chosen.select(range(begin, min(begin + ROWS, end))).to_list()


@functools.lru_cache(maxsize=2)
def load(source: str) -> Any:
    """Open a data set, downloading it where it is not here. Raises SourceError."""
    name, _, split = source.removeprefix(HUB).partition(":")
    if not Path(name).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "0"
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as lacking:
        raise SourceError(f"data.source: {source} needs the library datasets: install the extra 'hub'") from lacking
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, split=split or "train")
    except Exception as problem:  # the library raises whatever its readers raise
        why = str(problem).strip().splitlines()
        raise SourceError(f"data.source: {source} cannot be loaded: {why[0] if why else type(problem)}") from problem
