"""Megatron-DeepSpeed's options as data, made by its own parser (Apache-2.0; only names, types and choices are taken).

    git clone https://github.com/deepspeedai/Megatron-DeepSpeed && git -C Megatron-DeepSpeed checkout 4efb479
    python tests/training/cases/extract_megatron_deepspeed.py Megatron-DeepSpeed     # needs torch and deepspeed

What else its packages import is left out: the parser needs none of it.
"""

import argparse
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_parsers import UPSTREAM, rows, write

VERSION = "4efb479"
LEFT_OUT = {
    "megatron.global_vars": ("set_retro_args", "get_retro_args"),
    "tools.retro.utils": ("get_args_path",),
    "megatron.core.transformer": ("TransformerConfig",),
}


class Made(Exception):
    """The parser is made."""


def main(folder: Path) -> None:
    """Write upstream/megatron_deepspeed-<version>.json from a checkout."""
    for module, names in LEFT_OUT.items():
        made = types.ModuleType(module)
        for name in names:
            setattr(made, name, None)
        sys.modules[module] = made
    told = importlib.util.spec_from_file_location("arguments", folder / "megatron" / "arguments.py")
    assert told is not None
    assert told.loader is not None
    arguments = importlib.util.module_from_spec(told)
    told.loader.exec_module(arguments)
    with mock.patch.object(argparse.ArgumentParser, "parse_args", autospec=True, side_effect=Made) as parse:
        try:  # it makes and uses its parser in one function
            arguments.parse_args()
        except Made:
            upstream = {
                "repository": "deepspeedai/Megatron-DeepSpeed",
                "version": VERSION,
                "file": "megatron/arguments.py",
            }
            write(UPSTREAM / f"megatron_deepspeed-{VERSION}.json", upstream, rows(parse.call_args.args[0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
