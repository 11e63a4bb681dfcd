"""The table of a comparison: how each method ends."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_feddua.experiments.results import Method, result_names
from lightning_feddua.metric_names import Mode, best_mode, direction

LAST_ROUNDS = 5


def table_row(cells: Iterable[str]) -> str:
    """A row of a table in Markdown, of which a bar or a new line would end a cell."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


@dataclass
class Cell:
    """One number of the table: the mean over seeds, their standard deviation (NaN for one seed), whether it wins."""

    mean: float
    std: float
    best: bool = False

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "not finite"
        return f"{self.mean:.4g}" + (f" ± {self.std:.2g}" if math.isfinite(self.std) else "")


@dataclass
class Summary:
    """Each metric of each method: the mean of a run's last rounds, and its mean and deviation over seeds."""

    methods: Sequence[Method]
    metrics: Sequence[str]
    cells: dict[tuple[str, str], Cell]
    mode: Mode | None = None

    @property
    def caption(self) -> str:
        """What the numbers are, and which are best."""
        seeds = {len(method.runs) for method in self.methods}
        number = "/".join(map(str, sorted(seeds)))
        over = f", mean ± standard deviation over {number} seeds" if max(seeds) > 1 else ", one seed"
        directions = "; ".join(direction(metric, self.mode) for metric in self.metrics)
        return f"Mean of the last {LAST_ROUNDS} values of a run{over}. The best are bold: {directions}."

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [table_row(["method", *self.metrics]), f"|---|{'---|' * len(self.metrics)}"]
        for method in self.methods:
            cells = [self.cells[method.name, metric] for metric in self.metrics]
            texts = [f"**{cell}**" if cell.best else str(cell) for cell in cells]
            lines.append(table_row([method.name, *texts]))
        return "\n".join([*lines, "", self.caption, ""])

    def csv(self) -> str:
        """The table as CSV, a line for each method and metric, all digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["method", "metric", "mean", "std", "seeds"])
        for method in self.methods:
            for metric in self.metrics:
                cell = self.cells[method.name, metric]
                std = "" if math.isnan(cell.std) else cell.std
                writer.writerow([method.name, metric, cell.mean, std, len(method.runs)])
        return text.getvalue()


def summarize(methods: Sequence[Method], metric: str | None = None, mode: Mode | None = None) -> Summary:
    """The table of some methods.

    Args:
        methods: its rows.
        metric: its only column; if None, one for each metric by which methods are compared.
        mode: which value is best; if None, the metric's name decides.
    """
    metrics = result_names(methods) if metric is None else [metric]
    cells = {(m.name, name): Cell(*m.last_statistics(name, LAST_ROUNDS)) for m in methods for name in metrics}
    for name in metrics:
        column = [cells[method.name, name] for method in methods]
        finite = [cell.mean for cell in column if math.isfinite(cell.mean)]
        if finite:
            winner = min(finite) if best_mode(name, mode) == "min" else max(finite)
            for cell in column:
                cell.best = cell.mean == winner
    return Summary(methods, metrics, cells, mode)
