"""Plots as SVG inside Markdown: no hosting, works offline, both Prefect UIs show them."""

import base64
import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "castra", "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False})  # fmt: skip

COLOURS = ("#8c1c13", "#2a5d84", "#5a7d2a", "#b9862a", "#6b4a8a", "#777777")
Series = Sequence[tuple[float, float]]


def loss_curve(losses: Series, throughput: Series, baseline: float | None = None) -> str:
    """Training loss and throughput over steps, as a Markdown image. Losses in nats/token, throughput in tokens/s."""
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*_columns(losses), color="#8c1c13", linewidth=1.2)
    left.set(title="training loss", xlabel="step", ylabel="nats per token")
    if baseline is not None:
        left.axhline(baseline, color="#777777", linewidth=0.8, linestyle=":")
        left.annotate("uniform guess", (0, baseline), fontsize=7, color="#777777", va="bottom")
    right.plot(*_columns(throughput), color="#2a5d84", linewidth=1.2)
    right.set(title="throughput", xlabel="step", ylabel="tokens/s")
    right.set_ylim(bottom=0)
    return embedded(figure, "loss and throughput")


def bars(title: str, unit: str, values: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars, first one on top and in colour, as a Markdown image."""
    figure = Figure(figsize=(6.0, 0.5 + 0.4 * len(values)), layout="constrained")
    axes = figure.subplots()
    names, sizes = [name for name, _ in values][::-1], [value for _, value in values][::-1]
    drawn = axes.barh(names, sizes, color=["#b9b3a5"] * (len(values) - 1) + ["#8c1c13"])
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.set(title=title, xlabel=unit)
    axes.margins(x=0.15)
    return embedded(figure, title)


def curve(title: str, x: str, y: str, points: Series) -> str:
    """One line with a logarithmic x axis, as a Markdown image."""
    figure = Figure(figsize=(5.6, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_columns(points), color="#2a5d84", marker="o", markersize=3, linewidth=1.2)
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log")
    axes.set_ylim(bottom=0)
    return embedded(figure, title)


def bandwidths(panels: Mapping[str, Mapping[str, Series]]) -> str:
    """Bandwidths (GB/s) by message size (bytes), a panel each, a line per collective in it, as a Markdown image."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    drawn = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, lines) in zip(drawn, panels.items(), strict=True):
        for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
            axes.plot(*_columns(points), color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
        axes.set(title=title, xlabel="bytes", xscale="log", yscale="log")
    drawn[0].set_ylabel("GB/s")
    drawn[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return embedded(figure, "bandwidths")


UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
FEW = 14
"""Circles that can all be named."""


def pareto(plans: Series, gpus: Sequence[int], names: Sequence[str], best: Sequence[int]) -> Figure:
    """Plans by seconds (x) and dollars (y), a circle each whose area grows with its GPUs; `best` are in colour."""
    unit, length = next((one for one in UNITS if max(x for x, _ in plans) >= one[1]), UNITS[-1])
    places = [(seconds / length, usd) for seconds, usd in plans]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    area = [20 + 380 * count / max(gpus) for count in gpus]
    colour = ["#8c1c13" if index in best else "#b9b3a5" for index in range(len(places))]
    axes.scatter(*_columns(places), s=area, c=colour, alpha=0.75, linewidths=0)
    axes.plot(*_columns(_falling([places[index] for index in best])), color="#8c1c13", linewidth=0.9)
    for index in range(len(places)) if len(places) <= FEW else best:
        words = f"{names[index]}, {gpus[index]:,} GPU{'s' * (gpus[index] > 1)}"
        ink = "#222222" if index in best else "#8a8478"
        axes.annotate(words, places[index], (6, 8), textcoords="offset points", fontsize=7, rotation=20, color=ink)
    axes.set(xlabel=unit, ylabel="US dollars", xscale="log", yscale="log")
    axes.set_title("time, cost and GPUs (the larger the circle, the more)", pad=16)
    axes.margins(0.22)
    _plain(axes)
    return figure


def svg(figure: Figure) -> bytes:
    """A figure as an SVG file; the same figure gives the same bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def embedded(figure: Figure, words: str) -> str:
    """A figure as a Markdown image."""
    return f"![{words}](data:image/svg+xml;base64,{base64.b64encode(svg(figure)).decode()})"


def _falling(points: Series) -> list[tuple[float, float]]:
    """Those of the points that are lower than all to their left."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def _plain(axes: Axes) -> None:
    """Numbers on logarithmic axes as people write them, and as many as have room."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _columns(points: Series) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
