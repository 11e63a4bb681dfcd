"""What came of a sweep: the best point of each method, all of them in a table, and how much a key matters."""

from __future__ import annotations

import copy
import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_feddua.experiments.comparison_table import LAST_ROUNDS, Cell, table_row
from lightning_feddua.experiments.jobs import Job
from lightning_feddua.experiments.many_runs import folder_name
from lightning_feddua.experiments.plots import can_draw
from lightning_feddua.experiments.results import Method, check_metric, load_methods, result_names
from lightning_feddua.experiments.sweep.figure import Line, Panel, plot_panels
from lightning_feddua.experiments.sweep.space import Range, Settings, Space
from lightning_feddua.metric_names import Mode, best_mode, direction


@dataclass
class Trial:
    """A point that is tried, and its runs.

    Args:
        method: by which.
        settings: the point.
        recipe: the resolved recipe, with the first of the seeds.
        jobs: a run for each seed.
        cell: the mean of the metric over the last rounds and seeds, and its deviation over seeds; None for a failure.
    """

    method: str
    settings: Settings
    recipe: dict[str, Any]
    jobs: list[Job]
    cell: Cell | None = None


class Outcome:
    """Everything that was tried.

    Args:
        space: what was varied.
        metric: by which to choose; None for the first metric of validation.
        mode: which value of it is best; if None, its name decides.
    """

    def __init__(self, space: Space, metric: str | None, mode: Mode | None = None) -> None:
        self._space = space
        self._metric = metric
        self._mode = mode
        self._trials: list[Trial] = []

    def add(self, trials: Sequence[Trial], failed: Sequence[Job]) -> None:
        """Read the results of some trials, of whose runs some may have failed."""
        for trial in trials:
            if not any(job in failed for job in trial.jobs):
                methods = load_methods(job.folder for job in trial.jobs)
                if self._metric is None:
                    self._metric = result_names(methods)[0]
                check_metric(methods, self._metric)
                together = Method(trial.method, [run for method in methods for run in method.runs])
                trial.cell = Cell(*together.last_statistics(self._metric, LAST_ROUNDS))
        self._trials += trials

    def score(self, trial: Trial) -> float:
        """How bad a trial is; infinite if it failed or diverged."""
        if trial.cell is None or not math.isfinite(trial.cell.mean):
            return math.inf
        return trial.cell.mean if best_mode(str(self._metric), self._mode) == "min" else -trial.cell.mean

    def best(self) -> dict[str, Trial]:
        """The best trial of each method that has one."""
        groups: dict[str, list[Trial]] = {}
        for trial in self._trials:
            groups.setdefault(trial.method, []).append(trial)
        best = {name: min(group, key=self.score) for name, group in groups.items()}
        return {name: trial for name, trial in best.items() if math.isfinite(self.score(trial))}

    def write(self, root: Path) -> Iterator[str]:
        """Write table, figure and recipes into a folder, and say what is in them."""
        best = self.best()
        for trial in best.values():
            assert trial.cell is not None
            trial.cell.best = True
        ranked = sorted(self._trials, key=lambda trial: (trial.method, self.score(trial)))
        short = f"{self._markdown(list(best.values()))}\n{self._caption()}\n"
        (root / "table.md").write_text(f"{short}\n## All trials\n\n{self._markdown(ranked)}")
        (root / "table.csv").write_text(self._csv(ranked))
        written = ["table.md", "table.csv"]
        if best and can_draw():
            for ending in ("png", "pdf"):
                plot_panels(self.panels(), root / f"sensitivity.{ending}")
            written.append("sensitivity.png")
        for name, trial in best.items():
            file = f"best/{folder_name(name)}.yaml"
            title = f"{name}: {self._metric} {trial.cell}, the best of {len(self._of(name))} trials"
            _write_recipe(root / file, trial.recipe, title)
            written.append(file)
        if best:
            # A copy, or else YAML would write references to the presets instead of values.
            recipe = copy.deepcopy(next(iter(best.values())).recipe)
            recipe["presets"] = {name: trial.recipe for name, trial in best.items()}
            _write_recipe(root / "best.yaml", recipe, "The best of each method as presets, for `feddua compare`")
            written.append("best.yaml")
        yield f"\n{short}"
        yield f"{', '.join(written)} in {root}"

    def panels(self) -> list[Panel]:
        """For each key that was varied, the metric at its values, with all other keys at their best for it."""
        panels = []
        for key, dimension in self._space.items():
            lines = []
            for name in self.best():
                cells: dict[str, Trial] = {}
                for trial in self._of(name):
                    value = trial.settings.get(key)
                    if value is not None and self.score(trial) < self.score(cells.get(value, _NOTHING)):
                        cells[value] = trial
                if cells:
                    lines.append(Line(name, {value: trial.cell for value, trial in cells.items() if trial.cell}))
            if lines:
                panels.append(Panel(key, str(self._metric), lines, connected=not isinstance(dimension, Range)))
        return panels

    def _of(self, method: str) -> list[Trial]:
        return [trial for trial in self._trials if trial.method == method]

    def _caption(self) -> str:
        seeds = len(self._trials[0].jobs)
        over = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ", one seed"
        return (
            f"{direction(str(self._metric), self._mode)}: the mean of the last {LAST_ROUNDS} values of a run{over}."
            " The best of a method are bold."
        )

    def _markdown(self, trials: Sequence[Trial]) -> str:
        keys = list(self._space)
        lines = [table_row(["method", *keys, str(self._metric)]), f"|---|{'---|' * (len(keys) + 1)}"]
        for trial in trials:
            if trial.cell is None:
                result = "diverged" if all(job.finished or job.diverged for job in trial.jobs) else "failed"
            else:
                result = f"**{trial.cell}**" if trial.cell.best else str(trial.cell)
            row = [trial.method, *(trial.settings.get(key, "–") for key in keys), result]
            lines.append(table_row(row))
        return "\n".join([*lines, ""])

    def _csv(self, trials: Sequence[Trial]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["method", *self._space, "metric", "mean", "std", "seeds", "best"])
        for trial in trials:
            settings = [trial.settings.get(key, "") for key in self._space]
            cell = trial.cell or Cell(math.nan, math.nan)
            numbers = ["" if math.isnan(value) else value for value in (cell.mean, cell.std)]
            writer.writerow([trial.method, *settings, self._metric, *numbers, len(trial.jobs), int(cell.best)])
        return text.getvalue()


_NOTHING = Trial("", {}, {}, [])


def _write_recipe(path: Path, recipe: dict[str, Any], title: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A comment ends with its line, and the name of a preset may have several.
    path.write_text(f"# {' '.join(title.split())}.\n{yaml.safe_dump(recipe, sort_keys=False)}")
