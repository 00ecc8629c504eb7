"""torchtitan's configuration as data, read from its source (BSD-3-Clause; only names and types are taken).

git clone --branch v0.2.2 https://github.com/pytorch/torchtitan
python tests/training/cases/extract_torchtitan.py torchtitan
"""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_schemas import classes, write

VERSION = "v0.2.2"
FILE = "torchtitan/config/job_config.py"


def main(folder: Path) -> None:
    """Write upstream/torchtitan-<version>.json from a checkout."""
    source = folder / FILE
    names = [node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    told = {"repository": "pytorch/torchtitan", "version": VERSION, "file": FILE}
    write(
        f"torchtitan-{VERSION}",
        told,
        classes=classes([source], {name: name for name in names}),
        flavours=_flavours(folder / "torchtitan/models/llama3/__init__.py"),
        converters=[name for file in ("float8", "mx") for name in _converters(folder, file)],
        datasets=_keys(folder / "torchtitan/hf_datasets/text_datasets.py", "DATASETS"),
    )


def _flavours(source: Path) -> dict[str, dict[str, object]]:
    table = _dictionary(source, "llama3_args")
    return {
        str(ast.literal_eval(name)): {str(one.arg): ast.literal_eval(one.value) for one in made.keywords}
        for name, made in zip(table.keys, table.values, strict=True)
        if name is not None and isinstance(made, ast.Call)
    }


def _keys(source: Path, name: str) -> list[str]:
    return [str(ast.literal_eval(one)) for one in _dictionary(source, name).keys if one is not None]


def _dictionary(source: Path, name: str) -> ast.Dict:
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Dict):
            return node.value
    raise LookupError(f"{source} has no {name}")


def _converters(folder: Path, file: str) -> list[str]:
    tree = ast.parse((folder / f"torchtitan/components/quantization/{file}.py").read_text())
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    return [ast.literal_eval(one.args[1]) for one in calls if ast.unparse(one.func) == "register_model_converter"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
