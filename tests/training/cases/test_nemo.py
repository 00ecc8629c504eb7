"""What NeMo's trainer is told, held against its parser and its configuration's classes at the pinned tag."""

import json
from typing import Any

import pytest

from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import command, lines, of, spec
from tests.training.cases.upstream_parsers import Refused, parser
from tests.training.cases.upstream_schemas import hold, read
from training.cases import nemo
from training.cases.base import CaseError, Command, Paths

UPSTREAM = read(f"nemo-{nemo.UPSTREAM.version}")
NAME = "nemo-gpt3-5b"
EXPERTS = ("model.experts=8", "model.topk=2", "model.expert_ffn=512", "parallel.ep=2")


def checked(told: Command) -> dict[str, Any]:
    """The assignments as sections, if the trainer would take them."""
    options, assignments = parser(f"nemo-{nemo.UPSTREAM.version}").parse_known_args(told.argv[1:])
    assert options.recipe in UPSTREAM["recipes"]
    assert options.dataset in ("llm-pretrain", "llm-pretrain-mock")
    sections: dict[str, Any] = {}
    for one in assignments:
        path, equals, value = one.partition("=")
        assert equals, one
        section, _, name = path.partition(".")
        place = sections.setdefault(section, {}) if name else sections
        place[name or section] = hydra(value)
    hold(sections, UPSTREAM["classes"], "ConfigContainer")
    assert sections["mixed_precision"] in UPSTREAM["precisions"]
    return sections | {"seq_length": options.seq_length, "data": options.dataset}


def hydra(text: str) -> Any:
    """A value as Hydra's grammar of overrides reads it: quoted text, JSON's values, else text."""
    if text.startswith("'"):
        return text[1:-1].replace("\\'", "'").replace("\\\\", "\\")
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("nemo"))
def test_every_kind_tells_it_what_its_configuration_has(name: str, kind: str) -> None:
    told = command(name, kind=kind)
    assert told.argv[0] == "/opt/theirs/scripts/training/run_recipe.py"
    assert told.per == "rank"
    assert checked(told)["data"] == "llm-pretrain-mock"
    record(name, kind, "rendered", f"arguments parsed against Megatron Bridge {nemo.UPSTREAM.version}")


@pytest.mark.parametrize(
    ("name", "shape", "batch", "sizes", "rate"),
    [
        ("nemo-gpt3-126m", (12, 768, 12), (256, 4), (1, 1, None), 6e-4),
        ("nemo-gpt3-5b", (24, 4096, 32), (2048, 2), (1, 1, None), 1.6e-4),
        ("nemo-gpt3-40b", (48, 8192, 64), (2048, 1), (8, 1, None), 1.1e-4),
        ("nemo-gpt3-175b", (96, 12288, 96), (2048, 1), (4, 8, 12), 9e-5),
    ],
)
def test_the_recipes_are_the_published_ones(
    name: str, shape: tuple[int, ...], batch: tuple[int, ...], sizes: tuple[int | None, ...], rate: float
) -> None:
    """conf/training/gpt3/*.yaml of NeMo's launcher, with the micro batch of the published benchmark."""
    told = checked(command(name))
    model, train = told["model"], told["train"]
    assert (model["num_layers"], model["hidden_size"], model["num_attention_heads"]) == shape
    assert model["ffn_hidden_size"] == 4 * model["hidden_size"]
    assert (train["global_batch_size"], train["micro_batch_size"]) == batch
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    assert tuple(model.get(one) for one in names) == sizes
    assert (told["optimizer"]["lr"], told["optimizer"]["min_lr"]) == (rate, pytest.approx(rate / 10))
    assert (told["optimizer"]["adam_beta2"], told["optimizer"]["weight_decay"]) == (0.95, 0.1)
    assert (model["hidden_dropout"], told["seq_length"]) == (0.1, 2048)


def test_the_schedulers_decay_of_weights_is_the_plans() -> None:
    """Else the recipe's scheduler lays 0.033 over the optimizer's."""
    told = checked(command(NAME))["scheduler"]
    assert (told["start_weight_decay"], told["end_weight_decay"]) == (0.1, 0.1)


@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_both_sections_know_whether_the_optimizer_is_sharded(strategy: str) -> None:
    """Else the recipe's own True would win: either section's is taken for both."""
    told = spec(NAME)
    told["parallel"]["strategy"] = strategy
    found = checked(nemo.command(told, 2, 8, Paths("/o", "/b", "/d")))
    sharded = {found[section]["use_distributed_optimizer"] for section in ("ddp", "optimizer")}
    assert sharded == {strategy == "zero1"}


def test_our_own_data_is_read() -> None:
    told = checked(command(NAME, "case.program=''"))
    assert told["data"] == "llm-pretrain"
    assert told["dataset"]["data_path"] == "/fsx/dataset/megatron/train"
    assert told["dataset"]["split"] == "1,0,0"
    assert told["checkpoint"]["save"] == told["checkpoint"]["load"] == "/fsx/out/checkpoints"


def test_made_up_data_leaves_no_checkpoint() -> None:
    assert checked(command(NAME))["checkpoint"] == {"save": None, "load": None}


def test_what_the_planner_offloads_is_told() -> None:
    told = spec(NAME)
    told["parallel"]["offload"] = "optimizer"
    assert checked(nemo.command(told, 2, 8, Paths("/o", "/b", "/d")))["optimizer"]["optimizer_cpu_offload"] is True
    told["parallel"]["offload"] = "act"
    assert checked(nemo.command(told, 2, 8, Paths("/o", "/b", "/d")))["model"]["cpu_offloading_num_layers"] == 23


@pytest.mark.parametrize(
    ("sets", "section", "wanted"),
    [
        (("parallel.cp=2",), "model", {"context_parallel_size": 2}),
        (("parallel.recompute=full",), "model", {"recompute_granularity": "full", "recompute_num_layers": 1}),
        (("train.schedule=wsd",), "scheduler", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6}),
        (("train.precision=fp16",), "model", {}),
        (EXPERTS, "model", {"num_moe_experts": 8, "moe_router_topk": 2, "expert_model_parallel_size": 2}),
        (("model.family=llama", "model.kv_heads=8", "model.tie_embeddings=false"), "model",
         {"normalization": "RMSNorm", "num_query_groups": 8, "activation_func": "silu", "add_bias_linear": False}),
    ],
)  # fmt: skip
def test_plans_in_its_words(sets: tuple[str, ...], section: str, wanted: dict[str, Any]) -> None:
    assert wanted.items() <= checked(command(NAME, *sets))[section].items()


@pytest.mark.parametrize(
    "argument", ["model.num_layer=5", "train.train_iters=many", "nowhere.x=1", "ddp.overlap_grad_reduce=1",
                 "scheduler.lr_decay_style=sawtooth"],
)  # fmt: skip
def test_what_it_would_not_take_is_seen(argument: str) -> None:
    with pytest.raises(Refused):
        checked(command(NAME, f"case.arguments=[{argument!r}]"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parallel": {"strategy": "zero3"}}, "the optimizer only"),
        ({"train": {"precision": "fp32"}}, "no fp32"),
        ({"train": {"lora_rank": 8}}, "no adapters"),
        ({"model": {"mla": True}}, "latent attention"),
        ({"case": {"program": "finetune"}}, "mock"),
        ({"case": {"program": ""}}, "no data"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(change: dict[str, dict[str, Any]], sentence: str) -> None:
    wrong = spec(NAME)
    for section, values in change.items():
        wrong[section] |= values
    with pytest.raises(CaseError, match=sentence) as told:
        nemo.command(wrong, 2, 8, Paths("/out", "/opt/Megatron-Bridge"))
    assert "\n" not in str(told.value)


def test_text_is_quoted_for_hydra() -> None:
    told = command(NAME, 'case.arguments=["logger.tensorboard_dir=/a b/it\'s"]')
    assert checked(told)["logger"]["tensorboard_dir"] == "/a b/it's"


def test_figures_of_recorded_logs() -> None:
    found = [figures for line in lines("nemo") if (figures := nemo.measure(line))]
    assert found == [
        {"step": 100, "seconds": 3.7386, "loss": 7.968678, "grad_norm": 1.04},
        {"step": 71, "seconds": 5.3616, "tflops": 243.6, "loss": 1.818812, "grad_norm": 1.3},
    ]
