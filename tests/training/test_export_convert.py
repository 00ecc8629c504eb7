"""Foreign checkpoints to safetensors: DeepSpeed's and torch's own, really written by two ranks, bit for bit."""

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.export import convert as program
from training.export import stream
from training.export.convert import convert
from training.process import JobError

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[2]
RANKS = 2
STAGES = tuple(f"{stage}{low}" for stage in range(4) for low in ("", "-bf16"))


def be_a_rank(rank: int, root: str, port: int) -> None:
    """Write checkpoints of a small odd network by all stages of ZeRO and by torch.distributed.checkpoint."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__ = {}  # else it compiles its collectives
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for stage in STAGES:
        network = odd_network()
        weights = [weight for weight in network.parameters() if weight.requires_grad]
        groups = [[one for one in weights if one.ndim > 1], [one for one in weights if one.ndim == 1]]
        config = {
            "train_batch_size": 2 * RANKS,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": int(stage[0])},
            "bf16": {"enabled": stage.endswith("bf16")},
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
        engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config, dist_init_required=False)
        for step in range(2):
            engine.backward(engine(torch.full((2, 4), step)))
            engine.step()
        engine.save_checkpoint(f"{root}/zero{stage}", tag="last")
    write_dcp(Path(root) / "dcp")
    os._exit(0)


def odd_network() -> Any:
    """Tied, frozen and odd-sized weights, and buffers."""
    import torch
    from torch import nn

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(31, 7)
            self.up = nn.Linear(7, 13)
            self.frozen = nn.Linear(13, 7, bias=False)
            self.frozen.weight.requires_grad_(False)
            self.norm = nn.LayerNorm(7)
            self.head = nn.Linear(7, 31, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("count", torch.arange(5))
            self.register_buffer("scale", torch.tensor(0.37))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.frozen(torch.tanh(self.up(self.embed(tokens)))) * self.scale
            loss: torch.Tensor = self.head(self.norm(hidden)).float().logsumexp(-1).mean()
            return loss

    torch.manual_seed(0)
    return Odd()


def write_dcp(folder: Path) -> None:
    """Save weights cut by rows, by columns and not at all, beside an optimizer's state."""
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(3)
    whole = {"a.weight": torch.randn(7, 5), "b.weight": torch.randn(6, 9), "c.weight": torch.randn(3, 4, 5)}
    places = {"a.weight": Shard(0), "b.weight": Shard(1), "c.weight": Shard(2)}
    cut = {name: distribute_tensor(weight, mesh, [places[name]]) for name, weight in whole.items()}
    cut["d.bias"] = distribute_tensor(torch.randn(11).bfloat16(), mesh, [Replicate()])
    save({"model": cut, "optim": {"a.weight": torch.ones(3)}, "step": 7}, checkpoint_id=str(folder))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of every kind, written by two processes."""
    root = tmp_path_factory.mktemp("foreign")
    from tests.training.nursery import free_port

    environment = os.environ | {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(root), str(free_port())]
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (root / "dcp" / ".metadata").exists(), done.stderr[-3000:]
    return root


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


def by_deepspeed(folder: Path) -> dict[str, Any]:
    """Return what DeepSpeed's own converter makes of a folder."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if folder.name.startswith("zero0"):
        module = torch.load(folder / "last" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        return {name: one.float() if one.is_floating_point() else one for name, one in module.items()}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_of_zero_equals_deepspeeds_own_converter(written: Path, tmp_path: Path, stage: str) -> None:
    import torch

    theirs = by_deepspeed(written / f"zero{stage}")
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        told = convert(written / f"zero{stage}", tmp_path / dtype, dtype)
        ours = weights(tmp_path / dtype)
        assert told["tied"] == {"head.weight": "embed.weight"}
        expected = {name: one.to(kind) if one.is_floating_point() else one for name, one in theirs.items()}
        expected.pop("head.weight")  # written once
        lost = expected.keys() ^ ours.keys()
        assert lost <= ({"frozen.weight"} if stage[0] == "1" else set())  # DeepSpeed loses it in stage 1
        for name, one in expected.items():
            assert ours[name].dtype == one.dtype
            assert torch.equal(ours[name], one)


def test_a_tied_tensor_is_written_twice_where_the_config_says_untied(written: Path, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({"tie_word_embeddings": False, "torch_dtype": "x"}))
    convert(written / "zero3", tmp_path / "out", "bf16", config=tmp_path / "config")
    found = weights(tmp_path / "out")
    assert (found["head.weight"] == found["embed.weight"]).all()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_torchs_own_folder_gives_the_whole_tensors_of_the_model(written: Path, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(written / "dcp", tmp_path / "whole.pt")
    theirs = torch.load(tmp_path / "whole.pt", weights_only=False)
    convert(written / "dcp", tmp_path / "out")
    ours = weights(tmp_path / "out")
    assert ours.keys() == theirs["model"].keys()
    assert all(torch.equal(ours[name], theirs["model"][name].float()) for name in ours)
    convert(written / "dcp", tmp_path / "optim", prefix="optim.")
    assert weights(tmp_path / "optim")["a.weight"].tolist() == [1, 1, 1]
    with pytest.raises(JobError, match=r"begins with 'nothing\.'; its names begin with: model, optim"):
        convert(written / "dcp", tmp_path / "none", prefix="nothing.")


def test_the_conversion_imports_neither_torch_nor_deepspeed(written: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from training.export.convert import main; "
        f"assert main([{str(written / 'zero2')!r}, {str(tmp_path / 'out')!r}]) == 0; "
        "assert not {'torch', 'deepspeed', 'transformers', 'safetensors'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == 8


def test_done_is_done_and_something_else_is_never_overwritten(written: Path, tmp_path: Path) -> None:
    first = convert(written / "zero1", tmp_path / "out")
    stamp = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    assert convert(written / "zero1", tmp_path / "out") == first
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(JobError, match="out holds something already; remove it or name another folder"):
        convert(written / "zero1", tmp_path / "out", "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def harmed(written: Path, tmp_path: Path, name: str = "zero3") -> Path:
    shutil.copytree(written / name, tmp_path / name)
    return tmp_path / name


def test_a_folder_that_is_not_whole_is_told_in_one_sentence(written: Path, tmp_path: Path, capsys: Any) -> None:
    rank = "zero_pp_rank_1_mp_rank_00"
    for harm, words in (
        (lambda place: (place / f"last/{rank}_optim_states.pt").unlink(), "by 2 ranks and has .* of 1; copy all"),
        (lambda place: os.truncate(place / f"last/{rank}_optim_states.pt", 900), "is truncated or not written by"),
        (lambda place: (place / f"last/{rank}_model_states.pt").write_bytes(b""), "is truncated or not written by"),
        (lambda place: shutil.rmtree(place / "last"), "names last and .*last has no model states"),
        (lambda place: (place / "last/mp_rank_01_model_states.pt").write_bytes(b"x"), "truncated|several tensor"),
    ):
        folder = harmed(written, tmp_path)
        harm(folder)
        with pytest.raises(JobError, match=words):
            convert(folder, tmp_path / "out")
        shutil.rmtree(folder)
    folder = harmed(written, tmp_path, "dcp")
    os.truncate(next(folder.glob("__1_*.distcp")), 100)
    with pytest.raises(JobError, match=r"distcp is (truncated|not a checkpoint)"):
        convert(folder, tmp_path / "out")
    (folder / ".metadata").write_bytes(b"not a pickle")
    assert program.main([str(folder), str(tmp_path / "out")]) == 2
    assert ".metadata is damaged or not a checkpoint's metadata" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert program.main([str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "empty is no checkpoint: it has neither" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_models_checkpoint_is_told(written: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps({"hidden_size": 9, "vocab_size": 31}))
    with pytest.raises(JobError, match=r"zero3 has no embed_tokens\.weight among .*--prefix may help"):
        convert(written / "zero3", tmp_path / "out", config=config)
    write_folder(tmp_path / "hf", {"model.embed_tokens.weight": np.zeros((31, 7), np.float32)})
    with pytest.raises(JobError, match=r"another model's checkpoint: its .* is \[31, 7\] and --config says \[31, 9\]"):
        convert(tmp_path / "hf", tmp_path / "out", config=config)


class Evil:
    """What a pickle from elsewhere may hold."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_a_pickle_runs_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps({"state": Evil()}))
    with pytest.raises(JobError):
        convert(tmp_path / "evil", tmp_path / "out")
    import torch

    (tmp_path / "ds").mkdir()
    torch.save({"module": Evil()}, tmp_path / "ds" / "mp_rank_00_model_states.pt")
    with pytest.raises(JobError, match="ds is not a checkpoint as its kind is written"):
        convert(tmp_path / "ds", tmp_path / "out")
    assert not (tmp_path / "pwned").exists()


def write_folder(folder: Path, arrays: dict[str, Any]) -> Path:
    """Write arrays as a folder of safetensors."""
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Return a folder of 48 MB."""
    generator = np.random.default_rng(0)
    arrays = {f"w{i}": generator.standard_normal((512, 1024), np.float32) for i in range(24)}
    return write_folder(tmp_path / "large", arrays)


def test_a_conversion_that_is_killed_goes_on_to_the_same_bytes(large: Path, tmp_path: Path) -> None:
    convert(large, tmp_path / "whole", "bf16", max_shard_mb=2)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    out, kept = tmp_path / "out", tmp_path / ".out.fresh"
    code = (
        "import os, signal; from pathlib import Path; from training.export import stream; "
        "from training.export.convert import convert; name = stream._Out._name; done = []\n"
        "def die(self):\n    name(self); done.append(1)\n    len(done) > 4 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "stream._Out._name = die\n"
        f"convert(Path({str(large)!r}), Path({str(out)!r}), 'bf16', max_shard_mb=2)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    whole = {path.name: path.stat().st_ino for path in kept.glob("model-*.safetensors")}
    assert len(whole) >= 5
    convert(large, out, "bf16", max_shard_mb=2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    assert all((out / name).stat().st_ino == inode for name, inode in whole.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "out", "whole"]


def test_a_conversion_killed_at_any_moment_goes_on_to_the_same_bytes(large: Path, tmp_path: Path) -> None:
    convert(large, tmp_path / "whole", max_shard_mb=5)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    words = [sys.executable, "-m", "training.export.convert", str(large), str(tmp_path / "out"), "--max-shard-mb", "5"]
    for wait in (0.15, 0.25, 0.35):
        one = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
        time.sleep(wait)
        one.kill()
        one.wait()
    assert subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
def test_a_full_disk_is_told_before_and_while_it_happens(
    large: Path, small_disk: Path, capsys: Any, monkeypatch: Any
) -> None:
    assert program.main([str(large), str(small_disk / "out")]) == 2
    assert "the weights need 50.3 MB and the disk of" in capsys.readouterr().err
    monkeypatch.setattr(stream, "fits", lambda *_: None)
    assert program.main([str(large), str(small_disk / "out")]) == 2
    assert "No space left on device; make room or make it writable" in capsys.readouterr().err
    assert not list(small_disk.glob("out"))


if __name__ == "__main__":
    from torch.multiprocessing.spawn import start_processes

    start_processes(be_a_rank, (sys.argv[1], int(sys.argv[2])), nprocs=RANKS, start_method="fork")  # type: ignore[no-untyped-call]  # torch leaves it untyped
