"""neuronx-distributed's Llama examples' options as data, read from their source (MIT-0).

git clone --branch v2.27.0 https://github.com/aws-neuron/neuronx-distributed
python tests/training/cases/extract_neuronx.py neuronx-distributed
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_parsers import UPSTREAM
from tests.training.cases.upstream_parsers import write as write_options
from tests.training.cases.upstream_schemas import options

VERSION = "v2.27.0"
PROGRAMS = {
    "zero1": "examples/training/llama/tp_zero1_llama_hf_pretrain/tp_zero1_llama_hf_pretrain.py",
    "stages": "examples/training/llama/tp_pp_llama_hf_pretrain/run_llama_nxd.py",
}


def main(folder: Path) -> None:
    """Write upstream/neuronx_<program>-<version>.json from a checkout."""
    for name, file in PROGRAMS.items():
        told = {"repository": "aws-neuron/neuronx-distributed", "version": VERSION, "file": file}
        write_options(UPSTREAM / f"neuronx_{name}-{VERSION}.json", told, options(folder / file))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
