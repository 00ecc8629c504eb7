"""What nccl-tests mean by bandwidth, and how many ranks its two bandwidths give away. No torch.

algbw is bytes per second; busbw is algbw times a factor that depends on the collective and the number of ranks n, so
that it compares with what a link carries (NVIDIA/nccl-tests 03a204a1, doc/PERFORMANCE.md; send/recv: src/sendrecv.cu).
Both count the larger of a rank's two buffers: of a gather what it receives, of a reduce-scatter what it puts in.
Because the factor holds n, busbw / algbw says how many ranks took part, whatever else a log claims.
"""

import math
from collections.abc import Iterable
from typing import Final, NotRequired, TypedDict

TIMES: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "scatter": 1}
"""By collective, how often (n - 1) / n of the data passes a rank's link. Others have the factor 1, which tells no n."""


class Row(TypedDict):
    """One size of one collective."""

    collective: str
    bytes: int
    seconds: float
    """One operation on the slowest rank."""
    algbw_gbps: float
    """Unit: GB/s, as is `busbw_gbps`."""
    busbw_gbps: float
    wrong: NotRequired[int | None]
    """Elements that were not what they must be; None or absent where nobody looked."""
    in_place: NotRequired[bool]
    rounding: NotRequired[float]
    """How far the two bandwidths may be from the truth because they were printed; absent: as good as exact."""


def factor(collective: str, ranks: int) -> float:
    """Return busbw / algbw of a collective between `ranks` ranks."""
    times = TIMES.get(collective)
    return 1.0 if times is None else times * (ranks - 1) / ranks


def row(collective: str, size: int, seconds: float, ranks: int) -> Row:
    """Return what `size` bytes in `seconds` between `ranks` ranks mean."""
    speed = size / seconds / 1e9
    return Row(
        collective=collective,
        bytes=size,
        seconds=seconds,
        algbw_gbps=speed,
        busbw_gbps=speed * factor(collective, ranks),
    )


def ranks_of(measured: Row) -> tuple[int, float]:
    """Return the fewest and the most ranks that agree with a row's two bandwidths.

    (1, inf) where the row tells nothing; (a, b) with a > b where no number of ranks gives these bandwidths.
    From busbw / algbw = m (n - 1) / n follows n = m / (m - busbw / algbw). With two decimals, an all-reduce at A GB/s
    tells n exactly while n (n + 1) < 2 A / 0.03 (131 ranks at 260 GB/s, 52 at 42; often more), and n from half of it
    while n < A / 0.03 (8,600 ranks at 260 GB/s).
    """
    times = TIMES.get(measured["collective"])
    slack = measured.get("rounding", 0.0) + 1e-9 * measured["algbw_gbps"]
    if times is None or measured["algbw_gbps"] <= slack:
        return 1, math.inf
    if times == 1 and measured["algbw_gbps"] == measured["busbw_gbps"]:
        return 1, math.inf  # until 2020-06 nccl-tests had the factor in both (NVIDIA/nccl-tests#45)
    least = max(0.0, measured["busbw_gbps"] - slack) / (measured["algbw_gbps"] + slack)
    most = (measured["busbw_gbps"] + slack) / (measured["algbw_gbps"] - slack)
    if least >= times:
        return 1, 0
    return math.ceil(times / (times - least)), math.inf if most >= times else times / (times - most) // 1


def ranks_range(rows: Iterable[Row]) -> tuple[int, float]:
    """Return the fewest and the most ranks that agree with every row; the first is larger where rows contradict."""
    low, high = 1, math.inf
    for measured in rows:
        fewest, most = ranks_of(measured)
        low, high = max(low, fewest), min(high, most)
    return low, high


def wire_rate(measured: Row, nodes: int) -> float:
    """Return what each node sent over the network in an all-reduce, in GB/s, one direction.

    The nodes reduce inside first, so that the network carries an all-reduce between k nodes: algbw * 2 (k - 1) / k.
    """
    return measured["algbw_gbps"] * factor("all_reduce", nodes)
