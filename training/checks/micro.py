"""What one rank can do: matrix products, an MLP, embedding look-ups, copies in memory and to the host, its disk.

Each measurement is a `Work`: what is done, how much that is, and how to prepare it. `Clock` times it: the median of
several samples, each long enough that starting the kernels does not count.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

SAMPLES: Final = 5
SAMPLE_S: Final = {"cpu": 0.02, "cuda": 0.05}
"""How long a sample lasts at least, by device."""
WIDEST: Final = {"cpu": 2048, "cuda": 32768}
"""No side of a matrix is longer: the rest of a large model's would only take longer."""
TOKENS: Final = {"cpu": 512, "cuda": 8192}
SQUARES: Final = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of square products, each also taken four times as wide, and four times as deep, as the largest is not."""
ARRAY_BYTES: Final = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Of each of three arrays of the memory's measurement: more than any cache holds."""
PINNED_BYTES: Final = 256 << 20
FILE_BYTES: Final = {"cpu": 32 << 20, "cuda": 512 << 20}
CHUNK: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement."""

    what: str
    """gemm, mlp, attention, embedding, memory, host to device, device to host."""
    shape: str
    prepare: Callable[[], Callable[[], object]]
    """Makes the arrays, and returns what is timed."""
    flop: float = 0.0
    """Arithmetic of one go; 0 where bytes count."""
    size: float = 0.0
    """Bytes moved by one go."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Times what a device does."""

    device: "torch.device"
    samples: int = SAMPLES

    def seconds(self, work: Callable[[], object]) -> float:
        """The median time of one go, in seconds."""
        self._sample(work, 1)
        goes = max(1, round(SAMPLE_S[self.device.type] / max(self._sample(work, 1), 1e-9)))
        return median(self._sample(work, goes) for _ in range(self.samples))

    def _sample(self, work: Callable[[], object], goes: int) -> float:
        self.wait()
        began = time.perf_counter()
        for _ in range(goes):
            work()
        self.wait()
        return (time.perf_counter() - began) / goes

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def gemms(spec: Mapping[str, Any], device: "torch.device") -> Iterator[Work]:
    """The products of the recipe's own layers, and a sweep of squares and rectangles, in the recipe's precision."""
    dtype, kind = dtype_of(spec), device.type
    squares = SQUARES[kind]
    sweep = [(side, side, side) for side in squares]
    sweep += [shape for side in squares[:-1] for shape in ((side, 4 * side, side), (side, side, 4 * side))]
    for m, n, k in dict.fromkeys([*_products(spec, kind), *sweep]):
        yield Work("gemm", f"{m}x{n}x{k}", _product(m, n, k, dtype, device), flop=2.0 * m * n * k)


def mlps(spec: Mapping[str, Any], device: "torch.device") -> Iterator[Work]:
    """The recipe's MLP, forward and backward: three times the forward's arithmetic."""
    model, most = spec["model"], WIDEST[device.type]
    tokens, hidden = _tokens(spec, device.type), min(model["hidden_size"], most)
    ffn, gated = min(model["ffn_size"], most), bool(model.get("gated", True))
    flop = 3 * 2.0 * tokens * hidden * ffn * (3 if gated else 2)
    yield Work(
        "mlp",
        f"{tokens}x{hidden}x{ffn}{' gated' if gated else ''}",
        _mlp(tokens, hidden, ffn, gated, dtype_of(spec), device),
        flop=flop,
    )


def attentions(spec: Mapping[str, Any], device: "torch.device") -> Iterator[Work]:
    """The recipe's causal attention, forward and backward: two products of half the scores, and five (Dao 2023)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    model, dtype, most = spec["model"], dtype_of(spec), TOKENS[device.type]
    heads, sequence = min(model["heads"], 32), min(spec["data"]["sequence_length"], most)
    width, rows = _head(model), max(1, _tokens(spec, device.type) // sequence)

    def prepare() -> Callable[[], object]:
        sides = (rows, heads, sequence, width)
        q, k, v = (torch.randn(sides, device=device).to(dtype).requires_grad_() for _ in range(3))
        back = torch.ones_like(q)
        return lambda: torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v], back)

    flop = 3.5 * 2.0 * rows * heads * sequence * sequence * width
    yield Work("attention", f"{rows}x{heads}x{sequence}x{width}", prepare, flop=flop)


def embeddings(spec: Mapping[str, Any], device: "torch.device") -> Iterator[Work]:
    """Look-ups of random tokens in the recipe's embedding: each row is read and written."""
    import torch

    model, kind, dtype = spec["model"], device.type, dtype_of(spec)
    hidden = min(model["hidden_size"], WIDEST[kind])
    words, tokens = min(model["vocab_size"], (1 << 24 if kind == "cpu" else 1 << 30) // hidden), 8 * TOKENS[kind]

    def prepare() -> Callable[[], object]:
        table = torch.ones(words, hidden, dtype=dtype, device=device)
        ids = torch.randint(words, (tokens,), device=device)
        return lambda: torch.nn.functional.embedding(ids, table)

    yield Work("embedding", f"{tokens} of {words}x{hidden}", prepare, size=2.0 * tokens * hidden * dtype.itemsize)


def memories(spec: Mapping[str, Any], device: "torch.device") -> Iterator[Work]:
    """The sum of two arrays into a third, as STREAM's Add counts it (McCalpin 1995): two are read, one is written."""
    import torch

    del spec
    size = ARRAY_BYTES[device.type]

    def prepare() -> Callable[[], object]:
        a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
        return lambda: torch.add(a, b, out=c)

    yield Work("memory", f"3x{size >> 20} MiB", prepare, size=3.0 * size)


def hosts(spec: Mapping[str, Any], device: "torch.device") -> Iterator[Work]:
    """Copies between pinned memory of the host and the GPU, each way; nothing on a CPU."""
    import torch

    del spec
    if device.type != "cuda":
        return

    def prepare(there: bool) -> Callable[[], object]:
        pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        far = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=device)
        return lambda: far.copy_(pinned, non_blocking=True) if there else pinned.copy_(far, non_blocking=True)

    for what, there in (("host to device", True), ("device to host", False)):
        yield Work(what, f"{PINNED_BYTES >> 20} MiB", lambda there=there: prepare(there), size=float(PINNED_BYTES))  # type: ignore[misc]  # a default argument binds the loop's value


def disk_seconds(folder: Path, size: int, samples: int = 3) -> tuple[float, float]:
    """The median seconds to write a file of random bytes until they are on the disk, and to read it back from there.

    The file's name ends with this process's id, and it is gone afterwards. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunk = os.urandom(CHUNK)
    place, name = tempfile.mkstemp(prefix=".castra-disk-", suffix=f"-{os.getpid()}", dir=folder)
    os.close(place)
    try:
        wrote, read = zip(*(_disk_sample(name, chunk, size) for _ in range(samples)), strict=True)
        return median(wrote), median(read)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _disk_sample(name: str, chunk: bytes, size: int) -> tuple[float, float]:
    with Path(name).open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(max(1, size // len(chunk))):
            file.write(chunk)
        os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):  # else the page cache would be read
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with Path(name).open("rb", buffering=0) as file:
        began = time.perf_counter()
        while file.read(len(chunk)):
            pass
        return wrote, time.perf_counter() - began


def dtype_of(spec: Mapping[str, Any]) -> "torch.dtype":
    """The type of the recipe's products: 8 bits are measured in 16."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16}.get(spec["train"]["precision"], torch.bfloat16)


def _tokens(spec: Mapping[str, Any], kind: str) -> int:
    """Of one micro-batch."""
    micro = spec.get("parallel", {}).get("micro_batch_size", 1)
    rows = micro if isinstance(micro, int) else 1
    return int(min(rows * spec["data"]["sequence_length"], TOKENS[kind]))


def _products(spec: Mapping[str, Any], kind: str) -> list[tuple[int, int, int]]:
    """Tokens, outputs and inputs of the forward products of a layer, and of the head, no side longer than `WIDEST`."""
    model, most, tokens = spec["model"], WIDEST[kind], _tokens(spec, kind)
    hidden, ffn = model["hidden_size"], model["ffn_size"]
    head = _head(model)
    gates = 2 if model.get("gated", True) else 1
    shapes = [
        ((model["heads"] + 2 * model["kv_heads"]) * head, hidden),
        (hidden, model["heads"] * head),
        (gates * ffn, hidden),
        (hidden, ffn),
        (model["vocab_size"], hidden),
    ]
    return [(tokens, min(n, most), min(k, most)) for n, k in shapes]


def _head(model: Mapping[str, Any]) -> int:
    return int(model.get("head_dim") or model["hidden_size"] // model["heads"])


def _product(
    m: int, n: int, k: int, dtype: "torch.dtype", device: "torch.device"
) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        import torch

        # as a linear layer has them; of random numbers, since zeros draw less power and run faster
        a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
        out = torch.empty(m, n, dtype=dtype, device=device)
        return lambda: torch.mm(a, b.t(), out=out)

    return prepare


def _mlp(
    tokens: int, hidden: int, ffn: int, gated: bool, dtype: "torch.dtype", device: "torch.device"
) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        import torch
        from torch.nn.functional import gelu, silu

        def weight(*sides: int) -> "torch.Tensor":
            return (0.02 * torch.randn(*sides, device=device)).to(dtype).requires_grad_()

        rows, up, down = weight(tokens, hidden), weight(hidden, ffn), weight(ffn, hidden)
        gate = weight(hidden, ffn) if gated else None
        back = torch.ones(tokens, hidden, dtype=dtype, device=device)
        weights = [rows, up, down, *([] if gate is None else [gate])]

        def go() -> None:
            inner = gelu(rows @ up) if gate is None else silu(rows @ gate) * (rows @ up)
            torch.autograd.grad(inner @ down, weights, back)

        return go

    return prepare
