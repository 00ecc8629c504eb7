"""Megatron Bridge's trainer and configuration as data, read from its source (Apache-2.0; only names, types, choices).

git clone --branch v0.5.0 --recurse-submodules https://github.com/NVIDIA-NeMo/Megatron-Bridge
python tests/training/cases/extract_nemo.py Megatron-Bridge [Megatron-LM, where it is not below 3rdparty]
"""

import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_schemas import classes, options, write

VERSION = "v0.5.0"
CORE = (
    "core/model_parallel_config.py",
    "core/transformer/transformer_config.py",
    "core/optimizer/optimizer_config.py",
    "core/distributed/distributed_data_parallel_config.py",
    "core/datasets/blended_megatron_dataset_config.py",
    "core/datasets/gpt_dataset.py",
    "training/config/training_config.py",
    "training/config/common_config.py",
    "training/config/resilience_config.py",
)
BRIDGE = (
    "training/tokenizers/config.py",
    "training/mixed_precision.py",
    "training/comm_overlap.py",
    "training/config.py",
    "models/transformer_config.py",
    "models/gpt_provider.py",
)
SECTIONS = {
    "model": "GPTModelProvider",
    "train": "TrainingConfig",
    "validation": "ValidationConfig",
    "optimizer": "OptimizerConfig",
    "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig",
    "dataset": "GPTDatasetConfig",
    "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig",
    "rng": "RNGConfig",
    "dist": "DistributedInitConfig",
    "profiling": "ProfilingConfig",
    "mixed_precision": "MixedPrecisionConfig",
}


def main(bridge: Path, core: Path) -> None:
    """Write upstream/nemo-<version>.json from checkouts of the bridge and of the Megatron-LM that it pins."""
    sources = [*(core / "megatron" / one for one in CORE), *(bridge / "src/megatron/bridge" / one for one in BRIDGE)]
    known = classes(sources, {name: name for name in SECTIONS.values()})
    container = SECTIONS | {"mixed_precision": "MixedPrecisionConfig | str | None"}
    data = _list(bridge / "src/megatron/bridge/recipes/utils/dataset_utils.py", "DATASET_TYPES")
    write(
        f"nemo-{VERSION}",
        {"repository": "NVIDIA-NeMo/Megatron-Bridge", "version": VERSION, "core": "0.18.0", "files": [*CORE, *BRIDGE]},
        options=options(bridge / "scripts/training/run_recipe.py", {"DATASET_TYPES": data}),
        classes={"ConfigContainer": container, **known},
        recipes=_defined(bridge / "src/megatron/bridge/recipes/gpt/vanilla_gpt.py"),
        precisions=_registered(bridge / "src/megatron/bridge/training/mixed_precision.py"),
    )


def _list(source: Path, name: str) -> list[str]:
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return [str(one) for one in ast.literal_eval(node.value)]
    raise LookupError(f"{source} has no {name}")


def _defined(source: Path) -> list[str]:
    return re.findall(r"^def (\w+)", source.read_text(), re.MULTILINE)


def _registered(source: Path) -> list[str]:
    return re.findall(r"^@register\ndef (\w+)", source.read_text(), re.MULTILINE)


if __name__ == "__main__":
    given = [Path(one) for one in sys.argv[1:]]
    main(given[0], given[1] if len(given) > 1 else given[0] / "3rdparty/Megatron-LM")
