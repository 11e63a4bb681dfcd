"""The table of a comparison: how each method ends."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_feddua.experiments.results import Method, result_names
from lightning_feddua.host.evaluation import large_is_worse

LAST_ROUNDS = 5


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

    @property
    def caption(self) -> str:
        """What the numbers are."""
        seeds = {len(method.runs) for method in self.methods}
        number = "/".join(map(str, sorted(seeds)))
        over = f", mean ± standard deviation over {number} seeds" if max(seeds) > 1 else ", one seed"
        return f"Mean of the last {LAST_ROUNDS} values of a run{over}. The best are bold."

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [f"| method | {' | '.join(self.metrics)} |", f"|---|{'---|' * len(self.metrics)}"]
        for method in self.methods:
            cells = [self.cells[method.name, metric] for metric in self.metrics]
            texts = [f"**{cell}**" if cell.best else str(cell) for cell in cells]
            # A bar would end the cell.
            lines.append(f"| {' | '.join([method.name.replace('|', chr(92) + '|'), *texts])} |")
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


def summarize(methods: Sequence[Method]) -> Summary:
    """The table of some methods."""
    metrics = result_names(methods)
    cells = {(m.name, metric): Cell(*m.last_statistics(metric, LAST_ROUNDS)) for m in methods for metric in metrics}
    for metric in metrics:
        column = [cells[method.name, metric] for method in methods]
        finite = [cell.mean for cell in column if math.isfinite(cell.mean)]
        if finite:
            winner = min(finite) if large_is_worse(metric) else max(finite)
            for cell in column:
                cell.best = cell.mean == winner
    return Summary(methods, metrics, cells)
