"""Plots as SVG inside Markdown: no hosting, works offline, both Prefect UIs show them."""

import base64
import io
from collections.abc import Sequence

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "castra", "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False})  # fmt: skip

import matplotlib.pyplot as plt  # noqa: E402 - the backend is chosen first
from matplotlib.figure import Figure  # noqa: E402

Series = Sequence[tuple[float, float]]


def loss_curve(losses: Series, throughput: Series, baseline: float | None = None) -> str:
    """Training loss and throughput over steps, as a Markdown image. Losses in nats/token, throughput in tokens/s."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.0), layout="constrained")
    left.plot(*_columns(losses), color="#8c1c13", linewidth=1.2)
    left.set(title="training loss", xlabel="step", ylabel="nats per token")
    if baseline is not None:
        left.axhline(baseline, color="#777777", linewidth=0.8, linestyle=":")
        left.annotate("uniform guess", (0, baseline), fontsize=7, color="#777777", va="bottom")
    right.plot(*_columns(throughput), color="#2a5d84", linewidth=1.2)
    right.set(title="throughput", xlabel="step", ylabel="tokens/s")
    right.set_ylim(bottom=0)
    return _image(figure, "loss and throughput")


def bars(title: str, unit: str, values: Sequence[tuple[str, float]]) -> str:
    """Horizontal bars, first one on top and in colour, as a Markdown image."""
    figure, axes = plt.subplots(figsize=(6.0, 0.5 + 0.4 * len(values)), layout="constrained")
    names, sizes = [name for name, _ in values][::-1], [value for _, value in values][::-1]
    drawn = axes.barh(names, sizes, color=["#b9b3a5"] * (len(values) - 1) + ["#8c1c13"])
    axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=8)
    axes.set(title=title, xlabel=unit)
    axes.margins(x=0.15)
    return _image(figure, title)


def curve(title: str, x: str, y: str, points: Series) -> str:
    """One line with a logarithmic x axis, as a Markdown image."""
    figure, axes = plt.subplots(figsize=(5.6, 2.8), layout="constrained")
    axes.plot(*_columns(points), color="#2a5d84", marker="o", markersize=3, linewidth=1.2)
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log")
    axes.set_ylim(bottom=0)
    return _image(figure, title)


def _columns(points: Series) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _image(figure: Figure, words: str) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plt.close(figure)
    return f"![{words}](data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()})"
