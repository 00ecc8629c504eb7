"""Export beside DeepSpeed's and torch's own converters, on a checkpoint of 1.04e9 weights in their real formats.

    python -m benchmarks.export [rounds] [layers]

Every conversion is a process of its own, started in turn with the others, its files in the page cache. Measured is
the conversion itself, what it wrote brought to the disk included, imports not; the processor's time and the largest
anonymous memory (RssAnon of /proc) of the process, imports included. The limit reads every byte of the checkpoint and
writes as many as the result has. At the end all results are compared tensor by tensor.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

RANKS: Final = 2
LAYERS: Final = 16
HIDDEN: Final = 2048
FFN: Final = 8192
KV: Final = 512
VOCABULARY: Final = 32_000
POLL_S: Final = 0.01
CHUNK: Final = 4 << 20
PEERS: Final = {"zero": "deepspeed", "dcp": "torch", "own": "torch"}
Shapes = dict[str, tuple[int, ...]]


def shapes(layers: int) -> Shapes:
    """The weights of a Llama of width 2048: 1.04e9 with 16 layers."""
    found: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        block = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV, HIDDEN),
            "self_attn.v_proj": (KV, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found | {"model.norm.weight": (HIDDEN,)}


def craft_zero(folder: Path, told: Shapes) -> None:
    """Write the files of a ZeRO-3 checkpoint of two ranks, without moments; keys as deepspeed 0.19.8 writes them."""
    import torch

    tag = folder / "step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step1")
    sizes: OrderedDict[str, Any] = OrderedDict((name, torch.Size(shape)) for name, shape in told.items())
    count = sum(-(-shape.numel() // RANKS) for shape in sizes.values())
    for rank in range(RANKS):
        part = torch.empty(count).normal_(0, 0.02, generator=torch.Generator().manual_seed(rank))
        state = {"zero_stage": 3, "partition_count": RANKS, "fp32_flat_groups": [part]}
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model: dict[str, Any] = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [sizes],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "ds_version": "0.19.8",
        }
        torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def craft_dcp(folder: Path, told: Shapes, rank: int) -> None:
    """Write one of two ranks' part of a checkpoint with torch.distributed.checkpoint, every weight cut by rows."""
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    store = distributed.FileStore(str(folder.with_suffix(".store")), RANKS)  # type: ignore[attr-defined]  # untyped
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(rank)
    state = {
        name: DTensor.from_local(
            torch.empty(shape[0] // RANKS, *shape[1:]).normal_(0, 0.02, generator=generator), mesh, [Shard(0)]
        )
        for name, shape in told.items()
    }
    save({"model": state}, checkpoint_id=str(folder))
    distributed.barrier()
    os._exit(0)


def craft_own(folder: Path, told: Shapes) -> None:
    """Write the same cut and values as `craft_dcp` in Castra's own format."""
    import torch

    from training.checkpoint.image import Image
    from training.checkpoint.manifest import Identity, Manifest
    from training.checkpoint.piece import Piece

    folder.mkdir()
    files = {}
    for rank in range(RANKS):
        generator = torch.Generator().manual_seed(rank)
        pieces = []
        for name, shape in told.items():
            rows = shape[0] // RANKS
            part = torch.empty(rows, *shape[1:]).normal_(0, 0.02, generator=generator)
            pieces.append(Piece(name, shape, (rank * rows, *(0 for _ in shape[1:])), part))
        image = Image(pieces, pinned=False)
        image.fill(pieces)
        name = f"rank-{rank:05d}.safetensors"
        files[name] = image.write(folder / name)
        del pieces, image
    tensors = {name: {"dtype": "F32", "shape": list(shape)} for name, shape in told.items()}
    Manifest(1, Identity(1, "fsdp2", RANKS, {}), {}, tensors, files).write(folder)


def peer_deepspeed(folder: Path, out: Path, dtype: str) -> Callable[[], None]:
    """Convert by DeepSpeed, to safetensors, its default size of shards."""
    import torch
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            convert_zero_checkpoint_to_state_dict(str(folder), str(out), dtype=kind, safe_serialization=True)

    return run


def peer_torch(folder: Path, out: Path, dtype: str) -> Callable[[], None]:
    """Convert by torch to one file of torch.save, then that file to safetensors."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def run() -> None:
        out.mkdir()
        whole = out / "model.pt"
        dcp_to_torch_save(folder, whole)
        state = torch.load(whole, mmap=True)["model"]
        save_file({name: weight.to(kind) for name, weight in state.items()}, out / "model.safetensors")
        whole.unlink()

    return run


def ours(folder: Path, out: Path, dtype: str) -> Callable[[], None]:
    """Convert by Castra, without torch."""
    from training.export.convert import convert

    def run() -> None:
        convert(folder, out, dtype)

    return run


def limit(folder: Path, out: Path, dtype: str) -> Callable[[], None]:
    """Read every byte, write all (fp32) or every second block (bf16)."""

    def run() -> None:
        out.mkdir()
        buffer, every = bytearray(CHUNK), 2 if dtype == "bf16" else 1
        with (out / "limit.bin").open("wb", buffering=0) as target:
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                with path.open("rb", buffering=0) as source:
                    for count, got in enumerate(iter(lambda source=source: source.readinto(buffer), 0)):  # type: ignore[misc]  # a default argument
                        if count % every == 0:
                            target.write(memoryview(buffer)[:got])

    return run


def worker(kind: str, folder: Path, out: Path, dtype: str) -> None:
    """Be one measured process: import, tell that it begins, convert, put it on the disk, tell the seconds."""
    made = {"ours": ours, "deepspeed": peer_deepspeed, "torch": peer_torch, "limit": limit}[kind]
    run = made(folder, out, dtype)
    began = time.perf_counter()
    run()
    for path in out.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    os._exit(0)


def measured(kind: str, folder: Path, out: Path, dtype: str) -> dict[str, float]:
    """Run one conversion in a process and return its seconds and its largest anonymous memory (MB)."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.export", "worker", kind, str(folder), str(out), dtype]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    largest, before = 0, os.times()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as one:
        while one.poll() is None:
            largest = max(largest, _anonymous(one.pid))
            time.sleep(POLL_S)
        assert one.stdout is not None
        told = [line for line in one.stdout.read().splitlines() if line.startswith('{"seconds"')]
    assert one.returncode == 0, f"{kind} failed"
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": json.loads(told[-1])["seconds"], "processor": spent, "megabytes": largest / 1e3}


def compare(one: Path, other: Path) -> int:
    """Compare two folders of safetensors bit by bit; returns how many tensors they have."""
    from training.export.source import safetensors

    def digests(folder: Path) -> dict[str, str]:
        source = safetensors(folder)
        found = {name: hashlib.sha256() for name in source.tensors}
        for name, digest in found.items():
            for block in _blocks(source, name):
                digest.update(block)
        source.close()
        return {name: f"{source.tensors[name].dtype} {digest.hexdigest()}" for name, digest in found.items()}

    first, second = digests(one), digests(other)
    assert first == second, sorted(name for name in first if first[name] != second.get(name))[:3]
    return len(first)


def main(rounds: int, layers: int) -> None:
    """Craft the checkpoints, measure, compare, print."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as place:
        root = Path(place)
        told = shapes(layers)
        count = sum(_size(shape) for shape in told.values())
        print(f"{count:,} weights, {4 * count / 1e9:.2f} GB in fp32, {RANKS} ranks, median of {rounds}", flush=True)
        for format_, crafted in _crafted(root, layers):
            for dtype in ("fp32", "bf16"):
                _table(format_, crafted, root, dtype, rounds)
            shutil.rmtree(crafted)


def _table(format_: str, crafted: Path, root: Path, dtype: str, rounds: int) -> None:
    """Print one comparison: of DCP's and of our own format, whose content is the same, with torch on DCP's."""
    kinds = ["limit", "ours", *([PEERS[format_]] if format_ != "own" else [])]
    taken: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            taken[kind].append(measured(kind, crafted, root / f"out-{kind}", dtype))
    middle = {
        kind: {unit: statistics.median(one[unit] for one in told) for unit in told[0]} for kind, told in taken.items()
    }
    for kind, figures in middle.items():
        times = f"{figures['seconds']:7.2f} s, of the processor {figures['processor']:6.2f} s"
        print(f"{format_:5} {dtype} {kind:10} {times}, {figures['megabytes']:8.0f} MB anonymous")
    mine = middle["ours"]
    line = f"{format_:5} {dtype} ours / limit {mine['seconds'] / middle['limit']['seconds']:.2f}"
    if format_ != "own":
        peer = middle[PEERS[format_]]
        line += f", {PEERS[format_]} / ours {peer['seconds'] / mine['seconds']:.1f} in time"
        line += f", {peer['processor'] / mine['processor']:.1f} of the processor"
        line += f", {peer['megabytes'] / mine['megabytes']:.0f} in memory"
        line += f", {compare(root / 'out-ours', root / f'out-{PEERS[format_]}')} tensors bit for bit alike"
    print(line, flush=True)
    for kind in kinds:
        shutil.rmtree(root / f"out-{kind}", ignore_errors=True)


def _crafted(root: Path, layers: int) -> Iterator[tuple[str, Path]]:
    """Make one checkpoint after the other, in processes of their own."""
    for format_ in PEERS:
        folder = root / format_
        ranks = range(RANKS) if format_ == "dcp" else [0]
        words = [sys.executable, "-m", "benchmarks.export", "craft", format_, str(folder), str(layers)]
        crafts = [subprocess.Popen([*words, str(rank)], stderr=subprocess.DEVNULL) for rank in ranks]
        codes = [craft.wait() for craft in crafts]
        assert not any(codes), f"{format_} could not be crafted"
        yield format_, folder


def _anonymous(pid: int) -> int:
    """Return a process's anonymous resident memory, kB; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def _blocks(source: Any, name: str) -> Iterator[Any]:
    import numpy as np

    from training.export.dtypes import NUMPY

    stored = source.tensors[name]
    count = _size(stored.shape)
    for first in range(0, count, 2**20):
        out = np.empty(min(2**20, count - first), NUMPY[stored.dtype])
        source.read(name, first, out)
        yield out.data


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["worker"]:
        worker(words[1], Path(words[2]), Path(words[3]), words[4])
    elif words[:1] == ["craft"]:
        craft = {"zero": craft_zero, "own": craft_own}.get(words[1])
        if craft is None:
            craft_dcp(Path(words[2]), shapes(int(words[3])), int(words[4]))
        else:
            craft(Path(words[2]), shapes(int(words[3])))
    else:
        main(int(words[0]) if words else 3, int(words[1]) if len(words) > 1 else LAYERS)
