"""From a checkpoint of any layout to a folder any user can load: proven, whole or absent, the same bytes every time."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.exports import Cut, columns, job_of, network, recipe, result, rows, same, whole, write_checkpoint
from tests.training.exports import write_dataset as new_dataset
from training.export.generate import generate
from training.export.hf import export
from training.export.quantize import LOSS_RISE
from training.job import NodeJob
from training.process import JobError
from training.ranks import World
from training.score import score

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
LORA = {"lora_rank": 4, "lora_targets": ["q_proj", "down_proj"]}
Run = Callable[..., NodeJob]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_dataset(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Run:
    """Return the job of exporting a checkpoint that a layout wrote of the recipe's network."""

    def make(cut: Cut = whole, **parts: dict[str, Any]) -> NodeJob:
        spec = recipe(**parts)
        if not (tmp_path / "run").exists():
            write_checkpoint(tmp_path / "run", spec, network(spec), cut)
        return job_of(spec, tmp_path / "out", dataset=corpus, model=tmp_path / "run")

    return make


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


def trainable(spec: dict[str, Any]) -> dict[str, Any]:
    from training.model.anatomy import named_weights

    return {name: weight.detach() for name, weight in named_weights(network(spec))}


def bytes_of(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("cut", [whole, rows, columns])
def test_every_layout_gives_the_trained_weights(run: Run, cut: Cut) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from training.model import weights_sha256

    job = run(cut)
    export(job)
    told, folder = result(job.output), job.output / "hf"
    assert told["parity_max_abs_diff"] <= 1e-4
    assert told["files"] == sorted(bytes_of(folder))
    assert same(weights(folder), trainable(job.spec))
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert weights_sha256(model) == told["weights_sha256"]
    assert told["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert told["bytes"] < 4 * told["parameters"] * 1.2  # the tied embedding is written once
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "value_3 = compute(12, name=1)\n\n    x   =  don't  # naïve\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize(
    "model",
    [
        {"family": "mistral", "sliding_window": 16},
        {"family": "qwen2"},
        {"family": "qwen3", "tie_embeddings": False},
        {"family": "gemma"},
        {"family": "gemma2", "sliding_window": 16, "head_dim": 24},
        {"family": "gpt2", "kv_heads": 2},
    ],
)
def test_every_family_loads_with_transformers(run: Run, model: dict[str, Any]) -> None:
    from transformers import AutoConfig

    job = run(columns, model=model)
    export(job)
    assert result(job.output)["parity_max_abs_diff"] <= 1e-4
    assert same(weights(job.output / "hf"), trainable(job.spec))
    config = AutoConfig.from_pretrained(job.output / "hf", local_files_only=True)
    assert config.model_type == model["family"]
    assert config.architectures[0].endswith(("ForCausalLM", "LMHeadModel"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_the_weights_rounded_as_torch_does(run: Run, dtype: str) -> None:
    import torch

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    job = run(rows, export={"dtype": dtype})
    export(job)
    told = result(job.output)
    assert told["parity_max_abs_diff"] <= 1e-4
    assert told["bytes"] < 2 * told["parameters"] * 1.3
    assert same(weights(job.output / "hf"), {name: one.to(kind) for name, one in trainable(job.spec).items()})
    assert json.loads((job.output / "hf" / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")
    assert f"rounded to {dtype}" in (job.output / "hf" / "README.md").read_text()


def test_a_weight_too_large_for_fp16_is_told(run: Run, tmp_path: Path) -> None:
    import torch

    spec = recipe()
    made = network(spec)
    with torch.no_grad():
        made.model.norm.weight[3] = 1e6
    write_checkpoint(tmp_path / "run", spec, made)
    with pytest.raises(JobError, match=r"model\.norm\.weight holds 1e\+06 and fp16 ends at 65504; export bf16"):
        export(run(export={"dtype": "fp16"}))


@pytest.mark.parametrize(
    ("model", "lora"), [({}, LORA), ({"family": "gpt2", "kv_heads": 2}, LORA | {"lora_targets": ["c_attn", "c_fc"]})]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_are_added_to_the_weights_they_were_trained_beside(
    run: Run, corpus: Path, model: dict[str, Any], lora: dict[str, Any], dtype: str
) -> None:
    job = run(model=model, train=lora, export={"dtype": dtype})
    export(job)
    told = result(job.output)
    assert told["parity_max_abs_diff"] <= 1e-4
    found = weights(job.output / "hf")
    assert not any("lora" in name for name in found)
    assert "LoRA of rank 4" in (job.output / "hf" / "README.md").read_text()


def test_adapters_written_apart_are_as_peft_reads_them(run: Run) -> None:
    from safetensors.torch import load_file

    job = run(rows, train=LORA, export={"merge_lora": False})
    export(job)
    adapter = job.output / "hf" / "adapter"
    told = json.loads((adapter / "adapter_config.json").read_text())
    assert (told["peft_type"], told["r"], told["lora_alpha"]) == ("LORA", 4, 32.0)
    assert told["target_modules"] == ["down_proj", "q_proj"]
    trained = trainable(job.spec)
    assert same(
        load_file(adapter / "adapter_model.safetensors"),
        {f"base_model.model.{name}": one for name, one in trained.items() if ".lora_" in name},
    )
    assert same(weights(job.output / "hf"), {name: one for name, one in trained.items() if ".lora_" not in name})
    assert "adapter/adapter_model.safetensors" in result(job.output)["files"]


def test_adapters_of_a_pretrained_folder_are_added_to_its_weights(run: Run, corpus: Path, tmp_path: Path) -> None:
    first = run(export={"dtype": "bf16"})
    export(first)
    spec = recipe(model={"pretrained": str(first.output / "hf")}, train=LORA)
    made = network(spec, first.output / "hf")
    write_checkpoint(tmp_path / "tuned", spec, made)
    job = job_of(spec, tmp_path / "second", dataset=corpus, model=tmp_path / "tuned")
    export(job)
    base, now = weights(first.output / "hf"), weights(job.output / "hf")
    assert base.keys() == now.keys()
    changed = {name for name in base if not bool((base[name].float() == now[name]).all())}
    assert changed == {name for name in base if "q_proj" in name or "down_proj" in name}
    gone = recipe(model={"pretrained": str(tmp_path / "gone")}, train=LORA)
    with pytest.raises(JobError, match=r"model\.pretrained: .*gone has no config\.json here"):
        export(job_of(gone, tmp_path / "third", dataset=corpus, model=tmp_path / "tuned"))


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.01), ("int4", 0.12)])
def test_a_quantised_copy_tells_its_error_and_can_be_read_back(
    run: Run, tmp_path: Path, kind: str, error: float
) -> None:
    from training.export.convert import convert
    from training.export.quantize import load

    job = run(export={"quantize": kind})
    export(job)
    told = result(job.output)["quantized"]
    assert 0 < told["error_mean"] <= told["error_max"] < error
    assert abs(told["loss_change"]) <= told["loss_limit"]
    assert told["bytes"] < result(job.output)["bytes"]
    exact, back = weights(job.output / "hf"), load(job.output / f"hf-{kind}")
    assert exact.keys() == back.keys()
    kept = [name for name in exact if exact[name].ndim == 1 or "embed" in name]
    assert all((exact[name].numpy() == back[name]).all() for name in kept)
    convert(job.output / f"hf-{kind}", tmp_path / "back")
    assert all((weights(tmp_path / "back")[name].numpy() == back[name]).all() for name in back)
    assert "Quantised copy" in (job.output / "hf" / "README.md").read_text()


def test_a_quantised_copy_that_costs_too_much_is_refused(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setitem(LOSS_RISE, "int4", -10.0)
    job = run(export={"quantize": "int4"})
    with pytest.raises(JobError, match=r"the int4 copy's held-out loss is .* set export\.quantize to int8 or none"):
        export(job)
    assert not (job.output / "hf-int4").exists()
    assert not (job.output / "result.json").exists()


def test_the_same_checkpoint_gives_the_same_bytes_also_after_a_killed_export(run: Run, tmp_path: Path) -> None:
    job = run(export={"max_shard_mb": 1})
    job.spec["lineage"] = {"recipe": "tiny@0123abcd", "commit": {"castra": "89ab"}}
    export(job)
    again = NodeJob(job.spec, tmp_path / "second", job.inputs)
    for leftover in (".hf.fresh", "hf"):
        (tmp_path / "second" / leftover).mkdir(parents=True)
        (tmp_path / "second" / leftover / "model-00001-of-00009.safetensors").write_bytes(b"half")
    export(again)
    assert bytes_of(job.output / "hf") == bytes_of(tmp_path / "second" / "hf")
    assert result(job.output) == result(tmp_path / "second")
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == ["hf", "result.json"]
    card = (job.output / "hf" / "README.md").read_text()
    assert "| recipe | `tiny@0123abcd` |" in card
    assert "| commit.castra | `89ab` |" in card


def test_an_upload_that_is_refused_loses_nothing(run: Run, monkeypatch: Any) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    job = run(export={"push_to": "hf://me/tiny"})
    with pytest.raises(JobError, match="needs a token"):
        export(job)
    weights_file = job.output / "hf" / "model.safetensors"
    stamp = weights_file.stat().st_mtime_ns
    assert not (job.output / "result.json").exists()
    job.spec["export"]["push_to"] = ""
    export(job)
    assert weights_file.stat().st_mtime_ns == stamp
    assert sorted(path.name for path in job.output.iterdir()) == ["hf", "result.json"]


def test_a_difference_above_the_tolerance_leaves_no_export(run: Run, monkeypatch: Any) -> None:
    from training.export import hf

    def forgetful(*asked: Any) -> None:
        write(*asked)
        config = asked[-1] / "config.json"
        config.write_text(config.read_text().replace("10000.0", "500.0"))

    write = hf.write_config
    monkeypatch.setattr(hf, "write_config", forgetful)
    job = run()
    with pytest.raises(JobError, match=r"logits differ by up to .* and export\.parity_tolerance is 0\.0001"):
        export(job)
    assert not (job.output / "hf").exists()
    assert not (job.output / "result.json").exists()


def test_files_that_were_damaged_while_being_written_are_no_export(run: Run, monkeypatch: Any) -> None:
    from training.export import hf

    def careless(*asked: Any) -> Any:
        told = write(*asked)
        path = asked[-1] / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        return told

    write = hf.write_weights
    monkeypatch.setattr(hf, "write_weights", careless)
    with pytest.raises(JobError, match="is not the trained weight"):
        export(run())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "holds no complete checkpoint; run train first"),
        (lambda folder: os.truncate(folder / "rank-00001.safetensors", 999), "holds no complete checkpoint"),
        (lambda folder: (folder / "rank-00002.safetensors").unlink(), "holds no complete checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_not_exported(run: Run, harm: Callable[[Path], None], words: str) -> None:
    job = run(rows)
    harm(next(job.inputs["model"].glob("checkpoints/*")))
    with pytest.raises(JobError, match=words):
        export(job)
    assert not (job.output / "hf").exists()


def test_another_models_checkpoint_is_told(run: Run) -> None:
    run()
    with pytest.raises(JobError, match=r"is of another model than the recipe's: hidden_size 32 there and 64 here"):
        export(run(model={"hidden_size": 64, "ffn_size": 64}))


def test_the_card_tells_model_data_score_and_limits_and_no_time(run: Run, tmp_path: Path) -> None:
    job = run()
    score(NodeJob(job.spec, tmp_path / "score", job.inputs))
    export(NodeJob(job.spec, job.output, job.inputs | {"score": tmp_path / "score"}))
    card = (job.output / "hf" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    scored = result(tmp_path / "score")
    for line in (
        f"| **this model** | {scored['bits_per_byte']:.4f} |",
        f"| gzip | {scored['baselines']['gzip']:.4f} |",
        f"| parameters | {result(job.output)['parameters']:,} |",
        "| tokens of /corpus | 1 in 60 documents |",
        "| steps | 30 of 8 sequences |",
        "## Limits",
    ):
        assert line in card
    export(NodeJob(job.spec, tmp_path / "unscored", job.inputs))
    assert "Not scored." in (tmp_path / "unscored" / "hf" / "README.md").read_text()


def start(module: str, job: Path) -> str:
    command = [sys.executable, "-m", module, str(job)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_life_in_processes_of_their_own(corpus: Path, tmp_path: Path) -> None:
    """Train, score, export, speak: the export's weights are the training's, by their hash."""
    inputs = {"dataset": str(corpus), "model": str(tmp_path / "train"), "export": str(tmp_path / "export")}
    for module, name in (
        ("training.run", "train"),
        ("training.score", "score"),
        ("training.export.hf", "export"),
        ("training.export.generate", "speech"),
    ):
        job = {"spec": recipe(train={"learning_rate": 0.01}), "inputs": inputs, "output": str(tmp_path / name)}
        (tmp_path / f"{name}.json").write_text(json.dumps(job))
        log = start(module, tmp_path / f"{name}.json")
        assert all(line.startswith("@castra ") for line in log.splitlines())
    trained, scored, exported = (result(tmp_path / name) for name in ("train", "score", "export"))
    assert exported["weights_sha256"] == trained["weights_sha256"]
    assert scored["bits_per_byte"] < 3
    samples = result(tmp_path / "speech")["samples"]
    assert [sample["prompt"] for sample in samples] == ["value_1 = ", "# file"]
    assert all(sample["text"] for sample in samples)


@pytest.mark.parametrize(
    ("prompt", "words"), [("x " * 60, "tokens long and the model reads 1 to 31"), ("", "is 0 tokens long")]
)
def test_a_prompt_that_does_not_fit_is_told(run: Run, tmp_path: Path, prompt: str, words: str) -> None:
    job = run(serve={"prompts": [prompt]})
    export(job)
    import torch

    alone = World(0, 1, 0, 0, 1, torch.device("cpu"))
    with pytest.raises(JobError, match=words):
        generate(NodeJob(job.spec, tmp_path / "speech", {"export": job.output}), alone)
    with pytest.raises(JobError, match=r"there is no exported model in .* run export first"):
        generate(NodeJob(job.spec, tmp_path / "speech", {"export": tmp_path / "nothing"}), alone)
