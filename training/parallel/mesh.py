"""Which rank does what: the axes of parallelism, outermost first, and how a global batch is divided along them."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from training.process import JobError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first, so that the ranks of one tensor parallel group, who talk most, are neighbours on a node."""


@dataclass(frozen=True)
class Layout:
    """How many ranks lie along each axis, and where this one is."""

    rank: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    vpp: int = 1
    """Parts of the model that each pipeline stage holds."""

    @classmethod
    def of(cls, parallel: dict[str, Any], rank: int, size: int) -> "Layout":
        """Lay `size` ranks out as a recipe's `parallel` part asks. Raises JobError when they do not fit."""
        pp, cp, tp, vpp = (_size(parallel, name) for name in ("pp", "cp", "tp", "vpp"))
        data, rest = divmod(size, pp * cp * tp)
        if rest or not data:
            raise JobError(f"{size} ranks are no multiple of parallel.pp x cp x tp ({pp} x {cp} x {tp}); change one")
        if vpp > 1 and pp == 1:
            raise JobError(f"parallel.vpp is {vpp} and parallel.pp is 1; interleaving needs pipeline stages")
        sharded = parallel["strategy"] == "fsdp2"
        if not sharded and pp * cp * tp > 1:
            raise JobError(f"parallel.pp, cp and tp above 1 need strategy fsdp2, not {parallel['strategy']}")
        shard = parallel.get("shard", "auto")
        shard = (data if sharded else 1) if shard == "auto" else int(shard)
        if data % shard:
            raise JobError(f"parallel.shard ({shard}) does not divide the {data} data parallel ranks; change it")
        return cls(rank, pp, data // shard, shard, cp, tp, vpp)

    @property
    def size(self) -> int:
        """All ranks."""
        return self.pp * self.data * self.cp * self.tp

    @property
    def data(self) -> int:
        """How many different parts of a global batch there are."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def place(self) -> dict[str, int]:
        """This rank's place along each axis."""
        place, rest = {}, self.rank
        for name in reversed(AXES):
            rest, place[name] = divmod(rest, getattr(self, name))
        return place

    @property
    def data_rank(self) -> int:
        """Which part of a global batch is this rank's."""
        return self.place["dp_replicate"] * self.dp_shard + self.place["dp_shard"]

    @cached_property
    def mesh(self) -> "DeviceMesh":
        """The axes with several ranks (dp_shard always), as process groups; all ranks must ask for it together."""
        from torch.distributed.device_mesh import init_device_mesh

        names = [name for name in AXES if getattr(self, name) > 1 or name == "dp_shard"]
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, tuple(getattr(self, name) for name in names), mesh_dim_names=tuple(names))
        if self.cp > 1:  # weights are the same along cp: they are sharded, and gradients summed, along both
            mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        return mesh

    @property
    def sharding(self) -> "DeviceMesh":
        """Where FSDP2 cuts weights up (the last axis) and copies them (the first of two)."""
        shard = "dp_shard_cp" if self.cp > 1 else "dp_shard"
        return self.mesh["dp_replicate", shard] if self.dp_replicate > 1 else self.mesh[shard]

    def __str__(self) -> str:
        """Return the axes with several ranks, as "pp 2, tp 2"; "1 process" without any."""
        told = [f"{name} {getattr(self, name)}" for name in AXES if getattr(self, name) > 1]
        return ", ".join(told) + (f", vpp {self.vpp}" if self.vpp > 1 else "") or "1 process"


@dataclass(frozen=True, slots=True)
class Share:
    """How a global batch is divided: `micro` sequences at a time, `accumulation` times, on each data parallel rank."""

    micro: int
    accumulation: int

    @classmethod
    def of(cls, global_batch_size: int, micro_batch_size: int, ranks: int) -> "Share":
        """Divide the batch exactly. Raises JobError when that is impossible."""
        at_once = micro_batch_size * ranks
        if global_batch_size % at_once:
            raise JobError(
                f"train.global_batch_size ({global_batch_size}) is no multiple of parallel.micro_batch_size x ranks "
                f"({micro_batch_size} x {ranks} = {at_once}); change one of them"
            )
        return cls(micro_batch_size, global_batch_size // at_once)


@dataclass(frozen=True, slots=True)
class Rows:
    """A data parallel rank's part of a global batch, on the device."""

    tokens: Tensor
    """int64 [rows, length + 1]: inputs and targets overlap."""
    mask: Tensor | None
    """bool [rows, length]: which targets are learned; None is all."""
    documents: Tensor | None
    """int64 [rows, length]: the number of the document within its row; None where attention may look everywhere."""
    targets: int
    """Learned targets of the whole global batch."""

    def cut(self, micro: int) -> "list[Rows]":
        """Cut into micro-batches of `micro` rows; the last may have fewer."""
        starts = range(0, len(self.tokens), micro)
        parts = (self.tokens, self.mask, self.documents)
        cut = ([None if part is None else part[start : start + micro] for part in parts] for start in starts)
        return [Rows(tokens, mask, documents, self.targets) for tokens, mask, documents in cut if tokens is not None]


def _size(parallel: dict[str, Any], name: str) -> int:
    asked = parallel.get(name, "auto")
    return 1 if asked == "auto" else int(asked)
