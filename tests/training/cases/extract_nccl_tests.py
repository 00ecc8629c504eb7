"""nccl-tests' options as data, read from its source (BSD-3-Clause; only names are taken).

git clone --branch v2.18.3 https://github.com/NVIDIA/nccl-tests
python tests/training/cases/extract_nccl_tests.py nccl-tests
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_parsers import UPSTREAM, write

VERSION = "v2.18.3"
OPTION = re.compile(r'\{"(\w+)", (required_argument|no_argument), 0, \'(\w)\'\}')
TAKES = re.compile(r"case '(\w)':.*?break;", re.DOTALL)


def main(folder: Path) -> None:
    """Write upstream/nccl_tests-<version>.json from a checkout."""
    source = next(path for path in (folder / "src" / "common.cu", folder / "src" / "common.cpp") if path.exists())
    text = source.read_text()
    kinds = {
        found[1]: "int" if "strtol(" in found[0] else "size" if "parsesize" in found[0] else "str"
        for found in TAKES.finditer(text)
    }
    options = [
        {"names": [f"--{name}", f"-{short}"], "dest": name, "kind": "store", "type": kinds.get(short, "str")}
        if takes == "required_argument"
        else {"names": [f"--{name}", f"-{short}"], "dest": name, "kind": "store_true"}
        for name, takes, short in OPTION.findall(text)
    ]
    programs = sorted(path.name.removesuffix(".cu") for path in (folder / "src").glob("*.cu"))
    told = {"repository": "NVIDIA/nccl-tests", "version": VERSION, "file": str(source.relative_to(folder))}
    write(UPSTREAM / f"nccl_tests-{VERSION}.json", told | {"programs": " ".join(programs)}, options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
