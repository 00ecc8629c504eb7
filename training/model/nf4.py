"""Weights in 4 bits: NormalFloat with double quantisation (Dettmers et al., "QLoRA", 2023, sections 3 and appendix E).

A tensor is cut, row-major, into blocks of 64. Each weight becomes the nearest of 16 levels times its block's largest
absolute value; those scales, less their mean, become 8-bit floats in groups of 256 with one fp32 scale each. That is
0.5 + (1 + 4 / 256) / 64 = 0.516 bytes for a weight. What is made of it again, fp32, has the same bits everywhere:
weights are quantised on a CPU, and a level times a scale is one rounding.
"""

import math
from statistics import NormalDist
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK: Final = 64
GROUP: Final = 256
OFFSET: Final = 0.9677083
"""Where the outermost quantiles lie, so that they are finite: of the published levels."""
LARGEST: Final = 448.0
"""Of an 8-bit float (e4m3)."""


def levels() -> Tensor:
    """Return the 16 levels, fp32, rising from -1 to 1, 0 among them: equation 4 of the paper.

    8 quantiles of the normal distribution above 0, 7 below it, each side evenly spaced in probability.
    """
    normal = NormalDist()

    def side(count: int) -> list[float]:
        steps = [OFFSET + (0.5 - OFFSET) * step / count for step in range(count)]
        return [normal.inv_cdf(share) for share in steps]

    found = sorted([-one for one in side(7)] + [0.0] + side(8))
    return torch.tensor([one / max(found) for one in found], dtype=torch.float32)


class Nf4(nn.Module):
    """A weight in 4 bits: nothing that learns, and buffers that move to a device with the network."""

    codes: Tensor
    scales: Tensor
    ranges: Tensor
    mean: Tensor
    levels: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Make room for a weight of this shape."""
        super().__init__()
        self.shape = shape
        blocks = -(-math.prod(shape) // BLOCK)
        self.register_buffer("codes", torch.zeros(blocks * BLOCK // 2, dtype=torch.uint8), persistent=False)
        self.register_buffer("scales", torch.zeros(blocks, dtype=torch.uint8), persistent=False)
        self.register_buffer("ranges", torch.zeros(-(-blocks // GROUP)), persistent=False)
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.register_buffer("levels", levels(), persistent=False)

    @torch.no_grad()
    def keep(self, weight: Tensor) -> None:
        """Quantise a weight, fp32 on a CPU, of this one's shape."""
        blocks = _padded(weight.detach().float().cpu().reshape(-1), BLOCK)
        largest = blocks.abs().amax(1)
        self.mean.copy_(largest.mean())
        above = _padded(largest - self.mean.cpu(), GROUP)
        ranges = above.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        small = (above / ranges[:, None]).to(torch.float8_e4m3fn).reshape(-1)[: len(blocks)]
        self.ranges.copy_(ranges)
        self.scales.copy_(small.view(torch.uint8))
        scale = self._scale().cpu()
        middles = (self.levels[1:] + self.levels[:-1]).cpu() / 2
        nearest = torch.bucketize(blocks / torch.where(scale > 0, scale, 1.0)[:, None], middles).to(torch.uint8)
        pairs = nearest.reshape(-1, 2)
        self.codes.copy_(pairs[:, 0] | pairs[:, 1] << 4)

    @torch.no_grad()
    def weight(self) -> Tensor:
        """Return the weight that is kept, fp32, of the whole shape."""
        pairs = torch.stack((self.codes & 15, self.codes >> 4), 1).reshape(-1, BLOCK)
        whole = self.levels[pairs.int()] * self._scale()[:, None]
        return whole.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def forward(self, inputs: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        """Map [..., columns] to [..., rows]; nothing of full size is kept for the backward pass."""
        out: Tensor = _Linear.apply(inputs, self, transposed)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out if bias is None else out + bias

    @property
    def bytes(self) -> int:
        """All that is kept of the weight. Unit: bytes."""
        kept = (self.codes, self.scales, self.ranges, self.mean)
        return sum(part.numel() * part.element_size() for part in kept)

    def _scale(self) -> Tensor:
        """Return each block's scale, fp32 [blocks]."""
        small = self.scales.view(torch.float8_e4m3fn).float()
        return small * self.ranges.repeat_interleave(GROUP)[: len(small)] + self.mean


class _Linear(torch.autograd.Function):
    """A product with a weight that is made for it, and made again for the gradient of the inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, kept: Nf4, transposed: bool) -> Tensor:
        ctx.kept, ctx.transposed = kept, transposed
        device = inputs.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        ctx.kinds = kind, inputs.dtype
        weight = kept.weight().to(kind)
        return functional.linear(inputs.to(kind), weight.T if transposed else weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        kind, was = ctx.kinds
        weight = ctx.kept.weight().to(kind)
        return (slope.to(kind) @ (weight.T if ctx.transposed else weight)).to(was), None, None


def rounded(weight: Tensor) -> Tensor:
    """Return what a weight is once it has been kept in 4 bits, fp32."""
    kept = Nf4(tuple(weight.shape))
    kept.keep(weight)
    return kept.weight()


def _padded(values: Tensor, size: int) -> Tensor:
    """Cut values into blocks [count, size], the last one filled up with zeros."""
    return functional.pad(values, (0, -len(values) % size)).reshape(-1, size)
