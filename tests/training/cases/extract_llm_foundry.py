"""llm-foundry's configuration as data, read from its and Composer's source (Apache-2.0; only names and types).

git clone --branch v0.21.0 https://github.com/mosaicml/llm-foundry
git clone --branch v0.31.0 https://github.com/mosaicml/composer
python tests/training/cases/extract_llm_foundry.py llm-foundry composer
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.training.cases.upstream_parsers import UPSTREAM
from tests.training.cases.upstream_parsers import write as write_options
from tests.training.cases.upstream_schemas import classes, options, parameters, write

VERSION, COMPOSER = "v0.21.0", "v0.31.0"
CONVERTERS = {"hf": "scripts/data_prep/convert_dataset_hf.py", "json": "scripts/data_prep/convert_dataset_json.py"}
SCHEDULES = {
    "cosine_with_warmup": "CosineAnnealingWithWarmupScheduler",
    "linear_decay_with_warmup": "LinearWithWarmupScheduler",
    "constant_with_warmup": "ConstantWithWarmupScheduler",
}


def main(foundry: Path, composer: Path) -> None:
    """Write upstream/llm_foundry-<version>.json, and its converters' options, from checkouts."""
    utils = foundry / "llmfoundry/utils/config_utils.py"
    model = parameters(foundry / "llmfoundry/models/mpt/configuration_mpt.py", "MPTConfig")
    text = parameters(foundry / "llmfoundry/data/text_data.py", "StreamingTextDataset")
    config = classes([utils], {"TrainConfig": "TrainConfig"})["TrainConfig"] | {
        "model": "Model", "fsdp_config": "FSDPConfig | None", "train_loader": "Loader", "tokenizer": "Tokenizer",
        "optimizer": "DecoupledAdamW", "algorithms": "Algorithms", "callbacks": "Callbacks",
    }  # fmt: skip
    clipping = parameters(composer / "composer/algorithms/gradient_clipping/gradient_clipping.py", "GradientClipping")
    write(
        f"llm_foundry-{VERSION}",
        {"repository": "mosaicml/llm-foundry", "version": VERSION, "composer": COMPOSER},
        classes={
            "TrainConfig": config,
            # transformers' config takes anything, and MPT nothing that it does not name
            "Model": {"name": "str", "attn_config": "AttentionConfig"} | _named(model),
            "AttentionConfig": _defaults(foundry / "llmfoundry/models/utils/config_defaults.py"),
            "FSDPConfig": classes([composer / "composer/utils/parallelism.py"], {"": "FSDPConfig"})[""],
            "Loader": {"name": "str", "dataset": "StreamingTextDataset", "drop_last": "bool", "num_workers": "int"},
            "StreamingTextDataset": _named(text),
            "Tokenizer": {"name": "str", "kwargs": "dict"},
            "DecoupledAdamW": {"name": "str"}
            | parameters(composer / "composer/optim/decoupled_weight_decay.py", "DecoupledAdamW"),
            "Algorithms": {"gradient_clipping": "GradientClipping"},
            "GradientClipping": clipping,
            "Callbacks": dict.fromkeys(_registered(foundry / "llmfoundry/callbacks/__init__.py", "callbacks"), "dict"),
            "Scheduler": {"name": "str"},
        }
        | {
            name: {"name": "str"} | parameters(composer / "composer/optim/scheduler.py", made)
            for name, made in SCHEDULES.items()
        },
        models=_registered(foundry / "llmfoundry/models/__init__.py", "models"),
        optimizers=_registered(foundry / "llmfoundry/optim/__init__.py", "optimizers"),
        schedulers=_registered(foundry / "llmfoundry/optim/__init__.py", "schedulers"),
        loaders=_registered(foundry / "llmfoundry/data/__init__.py", "dataloaders"),
        precisions=re.findall(r" = '(\w+)'", (composer / "composer/core/precision.py").read_text()),
    )
    for name, file in CONVERTERS.items():
        told = {"repository": "mosaicml/llm-foundry", "version": VERSION, "file": file}
        write_options(UPSTREAM / f"llm_foundry_convert_{name}-{VERSION}.json", told, options(foundry / file))


def _named(fields: dict[str, str]) -> dict[str, str]:
    return {name: kind for name, kind in fields.items() if name != "**"}


def _defaults(source: Path) -> dict[str, str]:
    """The keys of MPT's attention, whose values' types are those of their defaults."""
    found: dict[str, dict[str, object]] = {}
    exec(source.read_text(), found)  # constants only
    told = found["attn_config_defaults"]
    return {name: "Any" if value is None else type(value).__name__ for name, value in told.items()}


def _registered(source: Path, registry: str) -> list[str]:
    return re.findall(rf"^{registry}\.register\(\s*'(\w+)'", source.read_text(), re.MULTILINE)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
