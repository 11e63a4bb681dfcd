"""How much a hyperparameter matters: a metric against it, a line for each method, as in the paper's Figure 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_feddua.experiments.comparison_table import Cell
from lightning_feddua.experiments.plots import add_legend, as_text, method_styles, pyplot, save


@dataclass
class Line:
    """A method: the metric at each value that was tried, values as on the command line."""

    method: str
    cells: Mapping[str, Cell]


@dataclass
class Panel:
    """A key and a line for each method that has it.

    Args:
        key: that was varied.
        metric: on the vertical axis.
        lines: the methods.
        connected: whether neighbours are joined, as for a grid; draws from a range are points, of which each has other
            values of the other keys.
    """

    key: str
    metric: str
    lines: Sequence[Line]
    connected: bool = True

    @property
    def values(self) -> list[str]:
        """All values on the horizontal axis; numbers in their order."""
        values = list(dict.fromkeys(value for line in self.lines for value in line.cells))
        return sorted(values, key=lambda value: _number(value) or 0) if self.numeric(values) else values

    @staticmethod
    def numeric(values: Sequence[str]) -> bool:
        """Whether all values are numbers."""
        return all(_number(value) is not None for value in values)


def plot_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels side by side; axes are logarithmic where a key spans a decade or the metric two, 0 being at the end.

    Args:
        panels: what to draw; all have the same metric.
        path: where to save the picture; its ending chooses the format.
    """
    styles = method_styles(sorted({line.method for panel in panels for line in panel.lines}))
    figure, grid = pyplot().subplots(
        1, len(panels), squeeze=False, sharey=True, figsize=(1 + 4.2 * len(panels), 4), layout="constrained"
    )
    means = [cell.mean for panel in panels for line in panel.lines for cell in line.cells.values()]
    handles: dict[str, Any] = {}
    for panel, axes in zip(panels, grid[0], strict=True):
        values = panel.values
        numeric = panel.numeric(values)
        for line in panel.lines:
            places = [value for value in values if value in line.cells]
            cells = [line.cells[value] for value in places]
            style = styles[line.method]
            handles[line.method] = axes.errorbar(
                [_number(value) for value in places] if numeric else [values.index(value) for value in places],
                [cell.mean for cell in cells],
                yerr=None if math.isnan(cells[0].std) else [cell.std for cell in cells],
                color=style.color,
                linestyle=((0, style.dash) if style.dash else "solid") if panel.connected else "none",
                linewidth=style.width,
                marker="o",
                markersize=5,
                # Where there are no lines to tell a rule from its sibling with momentum.
                markerfacecolor="white" if style.dash else style.color,
                elinewidth=0.8,
                capsize=2,
            )
        if numeric:
            _scale(axes.set_xscale, [float(value) for value in values], decades=1)
        else:
            axes.set_xticks(range(len(values)), map(as_text, values))
        _scale(axes.set_yscale, means, decades=2)
        axes.set_xlabel(as_text(panel.key))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel(as_text(panels[0].metric))
    add_legend(figure, handles)
    save(figure, path)


def _scale(set_scale: Any, values: Sequence[float], decades: int) -> None:
    positive = [value for value in values if value > 0]
    if min(values) >= 0 and positive and max(positive) >= 10**decades * min(positive):
        if min(values) > 0:
            set_scale("log")
        else:
            set_scale("symlog", linthresh=min(positive), linscale=0.5)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
