"""Commands about several runs: ``feddua compare``, ``feddua plot`` and ``feddua report``."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_feddua.cli.recipes import SECTIONS, find_recipe, load_recipe, merge, split_presets
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.experiments.comparison_table import summarize
from lightning_feddua.experiments.jobs import Job, run_jobs
from lightning_feddua.experiments.live_display import LiveDisplay
from lightning_feddua.experiments.plots import can_draw, check_picture, plot_curves, plot_overview
from lightning_feddua.experiments.report import write_report
from lightning_feddua.experiments.results import check_metric, load_methods, metric_names, result_names

# What `feddua fit` with some arguments would run: the recipe with all defaults filled in.
Resolve = Callable[[list[str]], dict[str, Any]]


def add_compare_arguments(parser: ArgumentParser) -> None:
    """What ``feddua compare`` takes."""
    add_many_runs_arguments(parser, "compare")


def add_many_runs_arguments(parser: ArgumentParser, folder: str) -> None:
    """What a command takes that makes many runs: of which recipe and methods, how often, and where.

    Args:
        parser: the command's.
        folder: where everything goes by default, in the recipe's ``out_dir``.
    """
    add = parser.add_argument
    add(
        "--config",
        nargs="+",
        type=str,
        required=True,
        help="a recipe, by its file or its shipped name; of several, later ones change earlier ones",
    )
    add("--methods", nargs="+", type=str, help="presets of the recipe, or server rules; all presets if left out")
    add("--seeds", type=int, default=1, help="how many seeds, of the loop and of the data, from the recipe's on")
    add("--jobs", type=int | None, default=None, help="how many runs at once; one a device or core if left out")
    add("--out", type=str | None, default=None, help=f"where everything goes; `{folder}` in the recipe's `out_dir`")
    add(
        "overrides",
        nargs="*",
        type=str,
        default=[],
        help="options of `feddua fit` for every run, as in --loop.max_rounds 50",
    )


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


def overrides_last(arguments: list[str]) -> list[str]:
    """Put what changes the recipe, as ``--loop.max_rounds 50`` does, behind a command's own arguments.

    >>> overrides_last(["--seeds", "3", "--loop.max_rounds", "50", "--jobs=2"])
    ['--seeds', '3', '--jobs=2', '--', '--loop.max_rounds', '50']
    """
    pattern = re.compile(rf"--(?:{'|'.join([*SECTIONS, 'loop'])})(?:[.=+]|$)")
    own: list[str] = []
    overrides: list[str] = []
    target = own
    for argument in arguments:
        if argument.startswith("--"):
            target = overrides if pattern.match(argument) else own
        target.append(argument)
    return [*own, "--", *overrides] if overrides else own


def compare(
    resolve: Resolve,
    config: Sequence[str],
    methods: Sequence[str] | None,
    seeds: int,
    jobs: int | None,
    out: str | None,
    overrides: list[str],
) -> int:
    """Run every method with every seed, then write a figure, a table and a report. Returns 1 if a run failed."""
    check_counts(seeds=seeds, jobs=jobs)
    # Every mistake in any of them is found here, before anything runs.
    recipes = {name: resolve(own) for name, own in method_arguments(config, methods, overrides).items()}
    first = next(iter(recipes.values()))
    root = Path(out) if out is not None else Path(first["loop"]["out_dir"]) / "compare"
    todo = [seeded_job(root, name, recipe, offset) for name, recipe in recipes.items() for offset in range(seeds)]
    if not can_draw():
        print('There will be no figure: run `pip install "lightning-feddua[plot]"` for Matplotlib.')
    failed = run_jobs(todo, root, jobs, LiveDisplay())
    finished = [job.folder for job in todo if job not in failed]
    if finished:
        _write_results(finished, root, ", ".join(Path(name).stem for name in config))
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
    methods = load_methods(folders)
    write_report(methods, Path(out), ", ".join(Path(folder).name or str(folder) for folder in folders))
    print(f"report in {out}")


def check_counts(**counts: int | None) -> None:
    """One clear error for an option that counts something and is less than 1."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"`--{name} {value}` is less than 1.", "Give a whole number from 1 up.")


def method_arguments(
    config: Sequence[str], methods: Sequence[str] | None, overrides: list[str]
) -> dict[str, list[str]]:
    """What each method would be as arguments of ``feddua fit``."""
    recipe: dict[str, Any] = {}
    for name in config:
        recipe = merge(recipe, load_recipe(find_recipe(name)))
    _, presets = split_presets(recipe)
    chosen = list(dict.fromkeys(methods or presets))
    if not chosen:
        raise ConfigurationError(
            f"The recipe `{config[-1]}` has no presets to compare.",
            "Name some servers, as in `--methods FedAvg FedDuAdam`.",
        )
    if any(re.match(r"--server(=|$)", argument) for argument in overrides):
        raise ConfigurationError(
            "`--server` was given to a comparison of servers.", "Choose them with `--methods`, or use `feddua fit`."
        )
    configs = [argument for name in config for argument in ("--config", name)]
    return {name: [*configs, "--preset" if name in presets else "--server", name, *overrides] for name in chosen}


def seeded_job(root: Path, method: str, recipe: dict[str, Any], offset: int, setting: str = "") -> Job:
    """A run with the recipe's seeds moved on: that of the loop, and every one in the data.

    Args:
        root: the folder of all runs.
        method: what to call the recipe.
        recipe: resolved.
        offset: by how much seeds move on.
        setting: what sets the recipe apart from others of its method, as in ``model.lr=0.1``.
    """
    recipe = copy.deepcopy(recipe)
    recipe["loop"]["seed"] += offset
    _move_seeds(recipe["data"], offset)
    seed = recipe["loop"]["seed"]
    folder = root / method_folder(method) / _setting_folder(",".join(filter(None, [setting, f"seed_{seed}"])))
    recipe["loop"]["out_dir"] = str(folder)
    return Job(" ".join(filter(None, [method, setting, f"seed {seed}"])), folder, recipe)


def method_folder(method: str) -> str:
    """The name of a method's folder: what any file system takes."""
    return re.sub(r"[^\w.+=,-]", "_", method)


def _setting_folder(text: str) -> str:
    """As above; a name that had to be changed ends with a hash, so that no two are the same.

    >>> _setting_folder("model.lr=0.1,seed_0"), _setting_folder("data.path=a/b")
    ('model.lr=0.1,seed_0', 'data.path=a_b-8e9d84af')
    """
    name = method_folder(text)[:150]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _move_seeds(section: Any, offset: int) -> None:
    if isinstance(section, dict):
        for key, value in section.items():
            if key == "seed" and isinstance(value, int):
                section[key] = value + offset
            else:
                _move_seeds(value, offset)


def _write_results(folders: Sequence[Path], root: Path, title: str) -> None:
    methods = load_methods(folders)
    table = summarize(methods)
    (root / "table.md").write_text(table.markdown())
    (root / "table.csv").write_text(table.csv())
    for ending in ("png", "pdf") if can_draw() else ():
        plot_curves(methods, result_names(methods), root / f"curves.{ending}")
    write_report(methods, root / "report.html", title)
    print(f"\n{table.markdown()}")
    written = ["curves.png", "table.md", "report.html"][0 if can_draw() else 1 :]
    print(f"{', '.join(written)} in {root}")
