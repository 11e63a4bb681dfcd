"""Tables and a picture of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_feddua.experiments.plots import pyplot

# Colour-blind-safe (Okabe and Ito): this project, everything else, and the limit.
_OURS, _OTHERS, _LIMIT = "#0072B2", "#E69F00", "#999999"


class Row(NamedTuple):
    """A variant and the median of its rounds."""

    label: str
    seconds: float


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio_table(rows: Sequence[Row]) -> str:
    """Seconds, and their ratio to the first row."""
    return markdown(
        ["variant", "seconds a round", "ratio"],
        [(row.label, f"{row.seconds:.4f}", f"{row.seconds / rows[0].seconds:.2f}") for row in rows],
    )


def plot_ratios(tables: dict[str, Sequence[Row]], path: Path) -> None:
    """Draw the time of a round of each variant, in units of the first: a panel for each task.

    Args:
        tables: the rows of each task.
        path: where to save the picture; its ending chooses the format.
    """
    plt = pyplot()
    tallest = max(len(rows) for rows in tables.values())
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(8, len(tables) * (1.1 + 0.32 * tallest)), squeeze=False, layout="constrained"
    )
    for axis, (task, rows) in zip(axes[:, 0], tables.items(), strict=True):
        ratios = [row.seconds / rows[0].seconds for row in rows]
        bars = axis.barh([row.label for row in rows], ratios, color=[_colour(i, row) for i, row in enumerate(rows)])
        labels = axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4)
        for label in labels:
            # Stays readable where the line of the bare loop runs through it.
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        axis.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
        axis.set(title=task, xlabel="time of a round, in units of the bare loop (less is better)")
        axis.set_xlim(0, 1.12 * max(ratios))
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _colour(index: int, row: Row) -> str:
    if "bare loop" in row.label:
        return _LIMIT
    return _OURS if row.label.startswith("FederatedLoop") else _OTHERS
