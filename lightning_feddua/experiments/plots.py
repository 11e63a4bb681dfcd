"""Pictures. Matplotlib is an extra and is imported only here, when a picture is drawn."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.experiments.results import Method, spans_decades
from lightning_feddua.files import writable
from lightning_feddua.metric_names import DIAGNOSTICS


class Style(NamedTuple):
    """How a method is drawn, in every picture.

    Args:
        color: of Okabe and Ito's palette, which the colour-blind can tell apart.
        dash: lengths of dashes and gaps in units of the line's width; none for a solid line.
        width: of the line, in points.
    """

    color: str
    dash: tuple[float, ...] = ()
    width: float = 1.6


BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.2, 1.2), (5, 1.5, 1.2, 1.5), (2.5, 1))
_MOMENTUM = _DASHES[1]

# A rule and its sibling with momentum share a colour; the sibling is dashed. FedDuA's lines are thick.
STYLES = {
    "FedAvg": Style(BLACK),
    "FedAvgM": Style(BLACK, _MOMENTUM),
    "FedExP": Style(ORANGE),
    "FedExPM": Style(ORANGE, _MOMENTUM),
    "FedAdagrad": Style(BLUE),
    "FedAdam": Style(BLUE, _MOMENTUM),
    "FedYogi": Style(SKY, _MOMENTUM),
    "FedDuAdagrad": Style(GREEN, (), 2.4),
    "FedDuAdam": Style(GREEN, _MOMENTUM, 2.4),
    "FedDuYogi": Style(VERMILLION, _MOMENTUM, 2.4),
}

# How the axis of a metric is called, where its own name does not say it.
TITLES = {
    "eta_g": "server step η_g",
    "heterogeneity": "heterogeneity, mean ‖Δᵢ‖² / ‖Δ̄‖²",
    "seconds": "seconds per round",
    "loss": "training loss",
}
# Of one picture, and of the letters of a name in it.
_MOST_PANELS = 60
_LONGEST = 80
PANELS = {False: "without momentum", True: "with momentum"}


def method_styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each method, different from all others; the named rules always have their own.

    A variant such as ``FedAvg (model.lr=0.1)`` keeps the colour of its rule. Any other name has a colour of its
    own, as far as that is free.

    >>> method_styles(["FedExP"])["FedExP"].color
    '#E69F00'
    """
    names = list(names)
    styles = {name: STYLES[name] for name in names if name in STYLES}
    others = [PURPLE, GREY, VERMILLION, SKY, BLUE, GREEN, ORANGE, BLACK]
    for name in names:
        if name in styles:
            continue
        rule = STYLES.get(name.partition(" (")[0])
        turn = zlib.crc32(name.encode()) % 3
        colors = [rule.color, *others] if rule else [*others[turn:3], *others[:turn], *others[3:]]
        wanted = itertools.product(colors, _DASHES) if rule else ((c, d) for d in _DASHES for c in colors)
        taken = {style[:2] for style in styles.values()}
        color, dash = next((pair for pair in wanted if pair not in taken), (GREY, ()))
        styles[name] = Style(color, dash, rule.width if rule else Style._field_defaults["width"])
    return styles


def plot_curves(methods: Sequence[Method], metrics: Sequence[str], path: Path) -> None:
    """Draw metrics over rounds, the mean over seeds with one standard deviation shaded.

    A row for each metric; methods without and with server momentum side by side, where there are both. Metrics that
    span decades have a logarithmic axis, and mean and deviation are then those of the logarithm. What jumps from round
    to round is drawn faintly, with its running median on top.

    Args:
        methods: what to compare.
        metrics: what to draw.
        path: where to save the picture; its ending chooses the format.
    """
    metrics = _shown(metrics)
    panels = [momentum for momentum in PANELS if any(method.momentum == momentum for method in methods)]
    styles = method_styles(method.name for method in methods)
    figure, grid = pyplot().subplots(
        len(metrics),
        len(panels),
        squeeze=False,
        sharex=True,
        sharey="row",
        figsize=(1 + 4.6 * len(panels), 0.9 + 3.1 * len(metrics)),
        layout="constrained",
    )
    for metric, row in zip(metrics, grid, strict=True):
        log = spans_decades(methods, metric)
        for momentum, axes in zip(panels, row, strict=True):
            for method in methods:
                if method.momentum == momentum and method.has(metric):
                    _draw(axes, method, metric, log, styles[method.name])
            _dress(axes, log)
        row[0].set_ylabel(_title(metric))
    for momentum, column in zip(panels, grid.T, strict=True):
        if len(panels) > 1:
            column[0].set_title(PANELS[momentum])
        column[-1].set_xlabel("round")
        lines, names = column[0].get_legend_handles_labels()
        if names:
            column[0].legend(lines, names, fontsize=8, framealpha=0.85, handlelength=3.2)
    save(figure, path)


def plot_overview(methods: Sequence[Method], metrics: Sequence[str], path: Path) -> None:
    """Draw many metrics over rounds, a small panel for each, all methods in each panel.

    Args:
        methods: what to compare.
        metrics: what to draw.
        path: where to save the picture; its ending chooses the format.
    """
    metrics = _shown(metrics)
    styles = method_styles(method.name for method in methods)
    columns = min(3, len(metrics))
    rows = -(-len(metrics) // columns)
    figure, grid = pyplot().subplots(
        rows, columns, squeeze=False, sharex=True, figsize=(4.4 * columns, 3.2 * rows + 0.5), layout="constrained"
    )
    handles: dict[str, Any] = {}
    for metric, axes in zip(metrics, grid.flat, strict=False):
        log = spans_decades(methods, metric)
        for method in methods:
            if method.has(metric):
                handles[method.name] = _draw(axes, method, metric, log, styles[method.name])
        _dress(axes, log)
        axes.set_title(_title(metric), fontsize=10)
        axes.set_xlabel("round")
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(metrics) :]:
        axes.set_visible(False)
    add_legend(figure, handles)
    save(figure, path)


def plot_labels(counts: np.ndarray, path: Path, title: str) -> None:
    """Draw how labels are distributed over clients: a row for each client, its size on the right.

    Args:
        counts: the number of samples of each client (row) and label (column).
        path: where to save the picture; its ending chooses the format.
        title: what the data is.
    """
    plt = pyplot()
    clients, labels = counts.shape
    figure, (shares, sizes) = plt.subplots(
        1, 2, sharey=True, figsize=(9, min(10, 2 + 0.08 * clients)), width_ratios=(4, 1), layout="constrained"
    )
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = shares.imshow(fractions, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    figure.colorbar(image, ax=shares, label="share of the client's samples")
    shares.set(xlabel=f"label ({labels})", ylabel=f"client ({clients})", title=as_text(title))
    sizes.barh(np.arange(clients), counts.sum(axis=1), height=0.9, color=BLUE)
    sizes.set(xlabel="samples")
    save(figure, path)


def check_picture(path: Path) -> None:
    """One clear error for a file that cannot become a picture."""
    allowed = pyplot().gcf().canvas.get_supported_filetypes()
    pyplot().close()
    if path.suffix[1:].lower() not in allowed:
        raise ConfigurationError(
            f"`{path}` does not end like a picture.", f"Choose an ending among {choices(allowed)}, such as `.png`."
        )


def _draw(axes: Any, method: Method, metric: str, log: bool, style: Style) -> Any:
    curve = method.curve(metric, log)
    smooth = curve.running_median() if metric in DIAGNOSTICS else None
    if smooth is not None:
        axes.plot(curve.rounds, curve.mean, color=style.color, linewidth=0.5, alpha=0.25)
    elif len(method.runs) > 1:
        axes.fill_between(curve.rounds, curve.low, curve.high, color=style.color, alpha=0.18, linewidth=0)
    (line,) = axes.plot(
        curve.rounds,
        curve.mean if smooth is None else smooth,
        color=style.color,
        linestyle=(0, style.dash) if style.dash else "solid",
        linewidth=style.width,
        label=as_text(method.name),
        # A single round is a point.
        marker="o" if len(curve.rounds) == 1 else None,
    )
    return line


def _dress(axes: Any, log: bool) -> None:
    if log:
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def as_text(name: str) -> str:
    r"""A name as Matplotlib is to show it: not as a formula, on one line, and also where it begins with ``_``.

    >>> print(as_text("cost in $ and $"))
    cost in \$ and \$
    """
    name = " ".join(name.split())
    name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"
    return (f" {name}" if name.startswith("_") else name).replace("$", r"\$")


def add_legend(figure: Any, handles: Mapping[str, Any]) -> None:
    """A legend of methods below a figure."""
    figure.legend(
        handles.values(),
        map(as_text, handles),
        loc="outside lower center",
        ncols=min(5, len(handles)),
        fontsize=8,
        handlelength=3.2,
    )


def _title(metric: str) -> str:
    return TITLES.get(metric) or as_text(metric)


def _shown(metrics: Sequence[str]) -> Sequence[str]:
    """As many as a picture can have."""
    if not metrics:
        raise ConfigurationError("The runs have logged no metric that could be drawn.", "Log one, or name other runs.")
    if len(metrics) > _MOST_PANELS:
        rank_zero_warn(f"The picture has {_MOST_PANELS} of {len(metrics)} metrics. Choose one with `--metric`.")
    return metrics[:_MOST_PANELS]


def save(figure: Any, path: Path) -> None:
    """Write a picture, and forget it."""
    try:
        with writable(path):
            figure.savefig(path, dpi=150)
    finally:
        pyplot().close(figure)


def can_draw() -> bool:
    """Whether Matplotlib is installed."""
    return find_spec("matplotlib") is not None


def pyplot() -> Any:
    """Matplotlib, for files alone; one clear error where it is missing."""
    if not can_draw():
        raise ConfigurationError(
            "Matplotlib is not installed, and a picture was asked for.", 'Run `pip install "lightning-feddua[plot]"`.'
        )
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
