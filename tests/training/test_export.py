"""From a real training run to a folder any user can load: score, export, speak; the same bytes every time."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.spec import Recipe
from training.data.prepare import prepare
from training.export.generate import generate
from training.export.hf import export, write_model
from training.job import NodeJob
from training.process import JobError
from training.score import score

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # a checkpoint is read by one process
]

ROOT = Path(__file__).parents[2]
LENGTH = 32


def recipe(source: Path) -> dict[str, Any]:
    told = Recipe(
        name="tiny",
        model={"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_size": 64, "vocab_size": 400},
        data={"source": str(source), "sequence_length": LENGTH, "min_chars": 10, "near_duplicate": 1, "held_out": 0.2},
        train={"steps": 30, "global_batch_size": 8, "warmup_steps": 2, "learning_rate": 0.01, "checkpoint_every": 30},
        parallel={"strategy": "ddp", "micro_batch_size": 8},
        score={"max_tokens": 2000},
        serve={"prompts": ("value_1 = ", "# file"), "max_new_tokens": 12},
    )
    return told.model_dump(mode="json")


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a small corpus and train on it, by the real programs."""
    root = tmp_path_factory.mktemp("life")
    (root / "corpus").mkdir()
    for i in range(60):
        lines = "".join(f"value_{j} = compute({i * j}, name={i % 7})\n" for j in range(i % 9 + 9))
        (root / "corpus" / f"{i}.py").write_text(f"# file {i} <|endoftext|>\n{lines}")
    spec = recipe(root / "corpus")
    prepare(NodeJob(spec, root / "data"))
    job = {"spec": spec, "inputs": {"dataset": str(root / "data")}, "output": str(root / "train")}
    (root / "train.json").write_text(json.dumps(job))
    start("training.run", root / "train.json")
    return root


def start(module: str, job: Path) -> str:
    command = [sys.executable, "-m", module, str(job)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def job_of(life: Path, output: Path, **parts: dict[str, Any]) -> NodeJob:
    spec = recipe(life / "corpus")
    for part, fields in parts.items():
        spec[part] = spec.get(part, {}) | fields
    return NodeJob(spec, output, {"dataset": life / "data", "model": life / "train"})


def result(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return told


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_trained_model_scores_better_than_counting_tokens(life: Path, tmp_path: Path) -> None:
    score(job_of(life, tmp_path))
    told = result(tmp_path)
    assert told["bits_per_byte"] < told["baselines"]["unigram"]
    assert told["bytes"] == sum(len(text) for text in held_out(life)[: told["documents"]])
    assert told["tokens"] <= 2000


def held_out(life: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (life / "data" / "held_out.jsonl").read_text().splitlines()]


def test_the_export_loads_anywhere_and_equals_the_checkpoint(life: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from training import checkpoint
    from training.model import build

    export(job_of(life, tmp_path))
    told = result(tmp_path)
    assert told["parity_max_abs_diff"] <= 1e-4
    assert told["files"] == sorted(path.name for path in (tmp_path / "hf").iterdir())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    newest = checkpoint.latest(life / "train")
    assert newest is not None
    trained = build(recipe(life / "corpus")["model"], LENGTH)
    checkpoint.load_weights(newest, trained)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
    assert told["parameters"] == sum(weight.numel() for weight in trained.parameters())
    assert told["bytes"] < 4 * told["parameters"] * 1.2  # the tied embedding is written once
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    text = "value_3 = compute(12, name=1)\n\n    x   =  don't  # naïve\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id


def test_the_same_checkpoint_gives_the_same_bytes_also_after_a_killed_export(life: Path, tmp_path: Path) -> None:
    lineage = {"recipe": "tiny@0123abcd", "dataset": "sha256:…"}
    export(job_of(life, tmp_path / "first", lineage=lineage))
    for leftover in (".hf.fresh", "hf"):
        (tmp_path / "second" / leftover).mkdir(parents=True)
        (tmp_path / "second" / leftover / "model-00001-of-00009.safetensors").write_bytes(b"half")
    export(job_of(life, tmp_path / "second", lineage=lineage))
    assert bytes_of(tmp_path / "first" / "hf") == bytes_of(tmp_path / "second" / "hf")
    assert result(tmp_path / "first") == result(tmp_path / "second")
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == ["hf", "result.json"]
    assert "| recipe | `tiny@0123abcd` |" in (tmp_path / "first" / "hf" / "README.md").read_text()


def test_half_precision_is_compared_with_the_weights_rounded_alike(life: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    export(job_of(life, tmp_path, export={"dtype": "bf16"}))
    told = result(tmp_path)
    assert told["parity_max_abs_diff"] <= 1e-4
    assert told["bytes"] < 2 * told["parameters"] * 1.3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto", local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert "rounded to bf16" in (tmp_path / "hf" / "README.md").read_text()


def test_big_models_come_in_shards_that_everybody_may_read(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from training.model import build, weights_sha256

    wide = {"hidden_size": 64, "ffn_size": 1000, "layers": 6, "heads": 2, "kv_heads": 2, "vocab_size": 1000}
    model = build(wide | {"tie_embeddings": False, "rope_theta": 1e4}, LENGTH)
    write_model(model, 0, 1, tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 4
    assert all(path.stat().st_size <= 1.01e6 and path.stat().st_mode & 0o777 == 0o644 for path in shards)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert weights_sha256(loaded) == weights_sha256(model)


def test_a_difference_above_the_tolerance_leaves_no_export(life: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from training.export import hf

    def forgetful(*asked: Any) -> None:
        write(*asked)
        config = asked[-1] / "config.json"
        config.write_text(config.read_text().replace("10000.0", "500.0"))

    write = hf.write_model
    monkeypatch.setattr(hf, "write_model", forgetful)
    with pytest.raises(JobError, match=r"logits differ by up to .* and export\.parity_tolerance is 0\.0001"):
        export(job_of(life, tmp_path))
    assert not (tmp_path / "hf").exists()
    assert not (tmp_path / "result.json").exists()


def test_the_card_tells_model_data_score_and_limits_and_no_time(life: Path, tmp_path: Path) -> None:
    score(job_of(life, tmp_path / "score"))
    job = job_of(life, tmp_path / "export")
    export(NodeJob(job.spec, job.output, job.inputs | {"score": tmp_path / "score"}))
    card = (tmp_path / "export" / "hf" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    scored = result(tmp_path / "score")
    for line in (
        f"| **this model** | {scored['bits_per_byte']:.4f} |",
        f"| gzip | {scored['baselines']['gzip']:.4f} |",
        f"| parameters | {result(tmp_path / 'export')['parameters']:,} |",
        "| steps | 30 of 8 sequences |",
        "## Limits",
    ):
        assert line in card
    export(job_of(life, tmp_path / "unscored"))
    assert "Not scored." in (tmp_path / "unscored" / "hf" / "README.md").read_text()


def test_the_export_speaks_in_a_process_of_its_own(life: Path, tmp_path: Path) -> None:
    export(job_of(life, tmp_path / "export"))
    job = {
        "spec": recipe(life / "corpus"),
        "inputs": {"export": str(tmp_path / "export")},
        "output": str(tmp_path / "g"),
    }
    (tmp_path / "generate.json").write_text(json.dumps(job))
    log = start("training.export.generate", tmp_path / "generate.json")
    samples = result(tmp_path / "g")["samples"]
    assert [sample["prompt"] for sample in samples] == ["value_1 = ", "# file"]
    assert all(sample["text"] for sample in samples)
    assert all(line.startswith("@castra ") for line in log.splitlines())


@pytest.mark.parametrize(
    ("prompt", "words"), [("x " * 60, "tokens long and the model reads 1 to 31"), ("", "is 0 tokens long")]
)
def test_a_prompt_that_does_not_fit_is_told(life: Path, tmp_path: Path, prompt: str, words: str) -> None:
    export(job_of(life, tmp_path / "export"))
    job = job_of(life, tmp_path / "out", serve={"prompts": [prompt]})
    with pytest.raises(JobError, match=words):
        generate(NodeJob(job.spec, job.output, {"export": tmp_path / "export"}))
    with pytest.raises(JobError, match=r"there is no exported model in .* run export first"):
        generate(NodeJob(job.spec, job.output, {"export": tmp_path / "nothing"}))
