"""Finished runs, read back from their folders: curves over rounds, and statistics over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lightning_feddua.callbacks import CSVLog, RunInfo
from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.experiments.reading import find_runs, read_columns, read_json, read_recipe
from lightning_feddua.launch.run_folders import RECIPE_FILE
from lightning_feddua.metric_names import BOOKKEEPING, DIAGNOSTICS, LAST_ITERATE

# What two runs of the same method may differ in.
_NOT_THE_METHOD = {"loop.out_dir", "loop.seed", "loop.devices", "loop.enable_progress_bar", "loop.tensorboard"}


@dataclass
class Run:
    """One run.

    Args:
        folder: where its ``metrics.csv`` is.
        name: of the method.
        columns: name -> (rounds, values); rounds in which it was not logged are left out.
        recipe: the resolved recipe, empty where none was saved.
        info: what :class:`RunInfo` wrote, or empty.
    """

    folder: Path
    name: str
    columns: dict[str, tuple[np.ndarray, np.ndarray]]
    recipe: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe as ``section.name`` -> value, without seeds and whatever else does not make another method."""
        flat = dict(flattened(self.recipe))
        return {
            key: value
            for key, value in flat.items()
            if key not in _NOT_THE_METHOD and not (key.startswith("data.") and key.endswith(".seed"))
        }

    @property
    def momentum(self) -> bool:
        """Whether the server has momentum."""
        return bool(self.settings.get("server.beta1", 0))

    def last_mean(self, metric: str, rounds: int) -> float:
        """The mean of the last so many values of a metric; NaN without any."""
        values = self.columns.get(metric, (None, np.empty(0)))[1][-rounds:]
        return float(values.mean()) if len(values) else math.nan


@dataclass
class Curve:
    """A metric over rounds, its mean over seeds and one standard deviation to either side."""

    rounds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def running_median(self) -> np.ndarray | None:
        """The mean without its jumps from round to round, for metrics that have many; None where rounds are few."""
        reach = len(self.mean) // 50
        if reach == 0:
            return None
        return np.array([np.median(self.mean[max(0, i - reach) : i + reach + 1]) for i in range(len(self.mean))])


@dataclass
class Method:
    """Runs that differ in their seeds alone."""

    name: str
    runs: list[Run]

    @property
    def momentum(self) -> bool:
        """Whether the server has momentum."""
        return self.runs[0].momentum

    def has(self, metric: str) -> bool:
        """Whether every run has logged it."""
        return all(metric in run.columns for run in self.runs)

    def curve(self, metric: str, log: bool = False) -> Curve:
        """The mean and standard deviation over seeds, in the rounds that all runs have.

        Args:
            metric: what.
            log: take them of the logarithm, as fits a logarithmic axis.
        """
        series = [run.columns[metric] for run in self.runs]
        common = series[0][0]
        for rounds, _ in series[1:]:
            common = np.intersect1d(common, rounds)
        values = np.stack([values[np.searchsorted(rounds, common)] for rounds, values in series])
        with np.errstate(all="ignore"):
            values = np.log(values) if log else values
            mean = values.mean(axis=0)
            std = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
            back = np.exp if log else np.asarray
            return Curve(common, back(mean), back(mean - std), back(mean + std))

    def last_statistics(self, metric: str, rounds: int) -> tuple[float, float]:
        """Mean and standard deviation over seeds of each run's :meth:`Run.last_mean`; the latter NaN for one seed."""
        values = np.array([run.last_mean(metric, rounds) for run in self.runs])
        with np.errstate(all="ignore"):
            return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan


def load_methods(folders: Iterable[Path | str]) -> list[Method]:
    """All runs in some folders and below, as methods: first those without momentum, then those with, by name."""
    runs = [run for folder in folders for run in _load_runs(Path(folder))]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings = sorted((key, repr(value)) for key, value in run.settings.items())
        groups.setdefault((run.name, repr(settings)), []).append(run)
    methods = [Method(name, members) for (name, _), members in groups.items()]
    for method in methods:
        namesakes = [other for other in methods if other.runs[0].name == method.runs[0].name]
        method.name += _difference(method, namesakes)
    taken: set[str] = set()
    for method in methods:
        if method.name in taken:
            method.name += f" in {method.runs[0].folder}"
        taken.add(method.name)
    return sorted(methods, key=lambda method: (method.momentum, method.name))


def metric_names(methods: Sequence[Method]) -> list[str]:
    """What the runs have logged, results first, without bookkeeping and the last iterate's twins."""
    names = dict.fromkeys(name for method in methods for run in method.runs for name in run.columns)
    shown = [name for name in names if name not in BOOKKEEPING and not name.startswith(f"{LAST_ITERATE}/")]
    return sorted(shown, key=lambda name: (name in DIAGNOSTICS, not name.startswith("val")))


def result_names(methods: Sequence[Method]) -> list[str]:
    """The metrics by which methods are compared: those of validation, or else what training logs."""
    names = [name for name in metric_names(methods) if name not in DIAGNOSTICS]
    return [name for name in names if name.startswith("val")] or names


def check_metric(methods: Sequence[Method], metric: str) -> None:
    """One clear error for a metric that no run has logged."""
    names = dict.fromkeys(name for method in methods for run in method.runs for name in run.columns)
    if metric not in names:
        raise ConfigurationError(f"No run has logged `{metric}`.", f"Choose one of {choices(names)}.")


def spans_decades(methods: Sequence[Method], metric: str) -> bool:
    """Whether a metric is positive and spans two decades, so that a logarithmic axis fits it."""
    values = np.concatenate([run.columns[metric][1] for m in methods for run in m.runs if metric in run.columns])
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() >= 100 * values.min())


def _load_runs(folder: Path) -> list[Run]:
    found = [_load_run(path, name) for path, name in find_runs(folder)]
    found = [run for run in found if run.columns]
    if not found:
        raise ConfigurationError(
            f"`{folder}` holds no run: there is no `{CSVLog.FILE_NAME}` with a round in it or below.",
            "Give the folder of a run, such as `runs/synthetic/version_0`, or one above such folders.",
        )
    return found


def _load_run(folder: Path, name: str | None) -> Run:
    recipe = read_recipe(folder / RECIPE_FILE)
    server = recipe.get("server")
    rule = server.get("class_path", folder.name) if isinstance(server, Mapping) else folder.name
    # Names of folders, and what YAML and JSON can say, may be no text.
    name = (name or str(rule).rpartition(".")[2]).encode(errors="replace").decode()
    columns = read_columns(folder / CSVLog.FILE_NAME)
    return Run(folder, name, columns, recipe, read_json(folder / RunInfo.FILE_NAME))


def flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in a part of a recipe, by the names that they have on the command line."""
    if not isinstance(value, Mapping) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        # `model.init_args.lr` is `model.lr`, as on the command line; `model.class_path` is `model`.
        name = prefix if prefix and key in ("init_args", "class_path") else f"{prefix}.{key}" if prefix else str(key)
        if inner != {}:
            yield from flattened(inner, name)


def _difference(method: Method, namesakes: Sequence[Method]) -> str:
    """What sets a method apart from others of its name, as in `` (model.lr=0.1)``."""
    if len(namesakes) == 1:
        return ""
    all_settings = [other.runs[0].settings for other in namesakes]
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    own = method.runs[0].settings
    apart = [key for key in keys if any(other.get(key) != own.get(key) for other in all_settings)]
    return f" ({', '.join(f'{key}={own.get(key)}' for key in apart)})"
