"""picotron's configuration as data: the keys of its template with their types, and which of them train.py reads.

git clone https://github.com/huggingface/picotron && git -C picotron checkout 59714b1
python tests/training/cases/extract_picotron.py picotron        # Apache-2.0; only names and types are taken
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_schemas import write

VERSION = "59714b1"
OPTIONAL = {"training.max_tokens": "int", "training.num_samples": "int", "dataset.subset_name": "str",
            "logging.run_name": "str", "environment.HF_TOKEN": "str"}  # fmt: skip
"""Keys that may be null, by train.py and create_config.py."""


def main(folder: Path) -> None:
    """Write upstream/picotron-<commit>.json from a checkout."""
    template = json.loads((folder / "template/base_config.json").read_text())
    sections = {name: _types(name, values) for name, values in template.items()}
    write(
        f"picotron-{VERSION}",
        {"repository": "huggingface/picotron", "version": VERSION, "file": "template/base_config.json, train.py"},
        classes={"Config": {name: name.title() for name in sections}}
        | {name.title(): fields for name, fields in sections.items()},
        needed=sorted(_read(folder / "train.py")),
    )


def _types(section: str, values: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in values.items():
        kind = OPTIONAL.get(f"{section}.{name}")
        found[name] = f"{kind} | None" if kind else type(value).__name__
    return found


def _read(source: Path) -> set[str]:
    """What train.py asks for as config["section"]["key"], without which it ends with a KeyError."""
    pairs = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
            section, outer = node.value, node.value.value
            if ast.unparse(outer) == "config" and isinstance(node.slice, ast.Constant):
                pairs.add(f"{ast.literal_eval(section.slice)}.{ast.literal_eval(node.slice)}")
    return pairs


if __name__ == "__main__":
    main(Path(sys.argv[1]))
