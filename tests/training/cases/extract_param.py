"""PARAM's options as data, read from its source (MIT).

git clone https://github.com/facebookresearch/param && git -C param checkout 1e115ff
python tests/training/cases/extract_param.py param
"""

import ast
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_parsers import UPSTREAM
from tests.training.cases.upstream_parsers import write as write_options
from tests.training.cases.upstream_schemas import options

VERSION = "1e115ff"
COMMS = "train/comms/pt"
DRIVER = "train/compute/pt/driver.py"
LISTS = ("supportedDevices", "supportedC10dBackends", "supportedTorchcommsBackends", "pt2ptPatterns")


def main(folder: Path) -> None:
    """Write upstream/param_<parser>-<version>.json from a checkout: comms.py, the driver, and each of its kernels."""
    lists = _lists(folder / COMMS / "pytorch_backend_utils.py")
    files = [folder / COMMS / "comms_utils.py", folder / COMMS / "comms.py"]
    _write("comms", f"{COMMS}/comms.py", [row for file in files for row in options(file, lists)])
    source = (folder / DRIVER).read_text()
    for name, variable in (("driver", "parser"), *((one, f"parser_{one}") for one in ("gemm", "emb", "linear"))):
        # a parser's own options: the others' calls are of other variables
        kept = folder / f"{name}.py"
        kept.write_text("\n".join(_of(source, variable)))
        _write(name, DRIVER, options(kept))
        kept.unlink()


def _of(source: str, variable: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [ast.unparse(one) for one in calls if ast.unparse(one.func) == f"{variable}.add_argument"]


def _lists(source: Path) -> dict[str, list[str]]:
    found = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in LISTS:
            found[name] = [str(one) for one in ast.literal_eval(node.value)]
    return found


def _write(name: str, file: str, rows: list[dict[str, Any]]) -> None:
    told = {"repository": "facebookresearch/param", "version": VERSION, "file": file}
    write_options(UPSTREAM / f"param_{name}-{VERSION}.json", told, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
