"""Commands about several runs: ``feddua compare``, ``feddua plot`` and ``feddua report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_feddua.experiments.comparison_table import summarize
from lightning_feddua.experiments.jobs import run_jobs
from lightning_feddua.experiments.live_display import LiveDisplay
from lightning_feddua.experiments.many_runs import (
    ManyRuns,
    Resolve,
    add_many_runs_arguments,
    say_if_nothing_is_drawn,
)
from lightning_feddua.experiments.plots import can_draw, check_picture, plot_curves, plot_overview
from lightning_feddua.experiments.report import write_report
from lightning_feddua.experiments.results import check_metric, load_methods, metric_names


def add_compare_arguments(parser: ArgumentParser) -> None:
    """What ``feddua compare`` takes."""
    add_many_runs_arguments(parser, "compare")


def add_plot_arguments(parser: ArgumentParser) -> None:
    """What ``feddua plot`` takes."""
    _add_folders(parser)
    parser.add_argument("--metric", type=str | None, default=None, help="what to draw, large; all metrics if left out")
    parser.add_argument("--out", type=str, default="curves.png", help="the picture; its ending chooses the format")


def add_report_arguments(parser: ArgumentParser) -> None:
    """What ``feddua report`` takes."""
    _add_folders(parser)
    parser.add_argument("--out", type=str, default="report.html", help="the file")


def _add_folders(parser: ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=str, help="folders of runs, or folders above them")


def compare(resolve: Resolve, asked: ManyRuns) -> int:
    """Run every method with every seed, then write a figure, a table and a report. Returns 1 if a run failed."""
    # Every mistake in any of them is found here, before anything runs.
    recipes = {name: resolve(arguments) for name, arguments in asked.method_arguments().items()}
    root = asked.root(next(iter(recipes.values())), "compare")
    todo = [job for name, recipe in recipes.items() for job in asked.seeded_jobs(root, name, recipe)]
    say_if_nothing_is_drawn()
    failed = run_jobs(todo, root, asked.jobs, LiveDisplay(), asked.check_logged)
    finished = [job.folder for job in todo if job not in failed]
    if finished:
        _write_results(finished, root, asked)
    for job in failed:
        print(f"failed: {job.name}, see {job.log}")
    return 1 if failed else 0


def plot(folders: Sequence[str], metric: str | None, out: str) -> None:
    """Draw a metric of some runs, or all of them in small panels."""
    path = Path(out)
    check_picture(path)
    methods = load_methods(folders)
    if metric is None:
        plot_overview(methods, metric_names(methods), path)
    else:
        check_metric(methods, metric)
        plot_curves(methods, [metric], path)
    print(f"picture in {path}")


def report(folders: Sequence[str], out: str) -> None:
    """Write an HTML report on some runs."""
    table = summarize(load_methods(folders))
    write_report(table, Path(out), ", ".join(Path(folder).name or str(folder) for folder in folders))
    print(f"report in {out}")


def _write_results(folders: Sequence[Path], root: Path, asked: ManyRuns) -> None:
    table = summarize(load_methods(folders), asked.metric, asked.mode)
    (root / "table.md").write_text(table.markdown())
    (root / "table.csv").write_text(table.csv())
    for ending in ("png", "pdf") if can_draw() else ():
        plot_curves(table.methods, table.metrics, root / f"curves.{ending}")
    write_report(table, root / "report.html", ", ".join(Path(name).stem for name in asked.config))
    print(f"\n{table.markdown()}")
    written = ["curves.png", "table.md", "report.html"][0 if can_draw() else 1 :]
    print(f"{', '.join(written)} in {root}")
