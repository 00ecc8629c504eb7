"""Megatron-LM's options as data, made by its own parser (Apache-2.0 and BSD; only names, types and choices are taken).

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    python tests/training/cases/extract_megatron_lm.py Megatron-LM        # needs torch, numpy, packaging

Its package's own imports (tokenizers and more) are left out: the parser needs none of them.
"""

import argparse
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_parsers import UPSTREAM, rows, write

VERSION = "core_v0.16.1"


def main(folder: Path) -> None:
    """Write upstream/megatron_lm-<version>.json from a checkout."""
    sys.path.insert(0, str(folder))
    package = types.ModuleType("megatron.training")
    package.__path__ = [str(folder / "megatron" / "training")]
    for name in ("get_args", "get_timers", "get_adlr_autoresume"):  # what its utils take from it, and no parser calls
        setattr(package, name, None)
    sys.modules["megatron.training"] = package
    from megatron.training.arguments import add_megatron_arguments  # type: ignore[import-not-found]  # of the checkout

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    told = {"repository": "NVIDIA/Megatron-LM", "version": VERSION, "file": "megatron/training/arguments.py"}
    write(UPSTREAM / f"megatron_lm-{VERSION}.json", told, rows(parser))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
