"""``feddua sweep``: the best hyperparameters of each method, and how much they matter."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from lightning_feddua.cli.recipe_classes import SECTIONS, check_arguments, section_class
from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.experiments.jobs import Job, default_workers, run_jobs
from lightning_feddua.experiments.live_display import LiveDisplay
from lightning_feddua.experiments.many_runs import (
    ManyRuns,
    Resolve,
    add_many_runs_arguments,
    check_counts,
    say_if_nothing_is_drawn,
)
from lightning_feddua.experiments.sweep.outcome import Outcome, Trial
from lightning_feddua.experiments.sweep.search import OptunaSearch, Search, grid_search, random_search
from lightning_feddua.experiments.sweep.space import Settings, Space, parse_space

JOURNAL = "optuna.journal"


def add_sweep_arguments(parser: ArgumentParser) -> None:
    """What ``feddua sweep`` takes."""
    parser.add_argument(
        "--space",
        nargs="+",
        type=str,
        required=True,
        help="what to vary: KEY=VALUES, as in model.lr=0.01,0.1 or model.lr=log:1e-3:1e-1:5, which is five points;"
        " where there is no grid, also a range log:LOW:HIGH, lin:LOW:HIGH or int:LOW:HIGH. Methods without such a key"
        " do without it",
    )
    parser.add_argument(
        "--search",
        type=Literal["grid", "random", "optuna"],
        default="grid",
        help="every combination, random ones, or those that Optuna proposes",
    )
    parser.add_argument("--trials", type=int, default=20, help="how many points per method, unless it is a grid")
    add_many_runs_arguments(parser, "sweep")


@dataclass(frozen=True, kw_only=True)
class Sweep(ManyRuns):
    """The arguments of ``feddua sweep``, as :func:`add_sweep_arguments` describes them."""

    space: Sequence[str]
    search: Literal["grid", "random", "optuna"]
    trials: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(trials=self.trials)


@dataclass
class _Candidate:
    """A method to be tuned.

    Args:
        name: of the method.
        arguments: what it is as arguments of ``feddua fit``.
        recipe: the resolved recipe, before anything is varied.
        space: what to vary.
    """

    name: str
    arguments: list[str]
    recipe: dict[str, Any]
    space: Space


def sweep(resolve: Resolve, asked: Sweep) -> int:
    """Try points of a space for every method, then write a table, a figure and the best recipes.

    Returns 1 if a run failed otherwise than by diverging, or if all did.
    """
    space = parse_space(asked.space)
    candidates = _candidates(resolve, space, asked.method_arguments())
    root = asked.root(candidates[0].recipe, "sweep")
    seed = candidates[0].recipe["loop"]["seed"]
    searches = [_make_search(candidate, asked, root, seed) for candidate in candidates]
    say_if_nothing_is_drawn()
    # Optuna learns from finished runs, so it is asked for no more than can run at once.
    workers = asked.jobs or default_workers(candidate.recipe for candidate in candidates)
    share = -(-workers // (len(candidates) * asked.seeds))
    outcome = Outcome(space, asked.metric, asked.mode)
    failed: list[Job] = []
    while True:
        points = [search.ask(share) for search in searches]
        if not any(points):
            break
        tried = [
            [_trial(resolve, candidate, settings, root, asked) for settings in own]
            for candidate, own in zip(candidates, points, strict=True)
        ]
        # Optuna may propose a point twice.
        todo = {job.folder: job for group in tried for trial in group for job in trial.jobs}
        failed += run_jobs(
            list(todo.values()), root, asked.jobs, LiveDisplay(), asked.check_logged, reuse_diverged=True
        )
        outcome.add([trial for group in tried for trial in group], failed)
        for search, group in zip(searches, tried, strict=True):
            search.tell([outcome.score(trial) for trial in group])
    for line in outcome.write(root):
        print(line)
    # That a point diverges is what a sweep is to find out.
    broken = [job for job in failed if not job.diverged]
    for job in broken:
        print(f"failed: {job.name}, see {job.log}")
    return 1 if broken or not outcome.best() else 0


def _make_search(candidate: _Candidate, asked: Sweep, root: Path, seed: int) -> Search:
    if asked.search == "grid" or not candidate.space:
        return grid_search(candidate.space)
    if asked.search == "random":
        return random_search(candidate.space, asked.trials, seed)
    return OptunaSearch(candidate.space, asked.trials, seed, root / JOURNAL, _study_name(candidate, asked))


def _candidates(resolve: Resolve, space: Space, methods: Mapping[str, list[str]]) -> list[_Candidate]:
    """The methods, each with the part of the space that it has; a mistake in any value is found here."""
    for key in space:
        section = key.partition(".")[0]
        if section not in (*SECTIONS, "loop") or key == "server":
            raise ConfigurationError(
                f"`{key}` cannot be varied.",
                "Choose rules with `--methods`."
                if key == "server"
                else f"Give a key that begins with one of {choices([*SECTIONS, 'loop'])}, such as `model.lr`.",
            )
    recipes = {name: resolve(arguments) for name, arguments in methods.items()}
    for key in space:
        if not any(_has(recipe, key) for recipe in recipes.values()):
            section, _, name = key.partition(".")
            cls, _ = section_class(section, next(iter(recipes.values()))[section])
            check_arguments(section, cls, [name.partition(".")[0]])
    candidates = []
    for name, arguments in methods.items():
        own = {key: dimension for key, dimension in space.items() if _has(recipes[name], key)}
        for key, dimension in own.items():
            for value in dimension.probes:
                resolve([*arguments, f"--{key}", value])
        candidates.append(_Candidate(name, arguments, recipes[name], own))
    return candidates


def _has(recipe: Mapping[str, Any], key: str) -> bool:
    """Whether a recipe's class takes a key, as ``server.eta_g`` is taken by some rules and not by others."""
    section, _, name = key.partition(".")
    if section not in SECTIONS or not name:
        return True
    parameters = inspect.signature(section_class(section, recipe[section])[0]).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_all or name.partition(".")[0] in parameters


def _trial(resolve: Resolve, candidate: _Candidate, settings: Settings, root: Path, asked: Sweep) -> Trial:
    recipe = resolve([*candidate.arguments, *(part for key in settings for part in (f"--{key}", settings[key]))])
    text = ",".join(f"{key}={value}" for key, value in settings.items())
    return Trial(candidate.name, settings, recipe, asked.seeded_jobs(root, candidate.name, recipe, text))


def _study_name(candidate: _Candidate, asked: Sweep) -> str:
    """Another for every change of what is asked: points that were judged by something else must not be learnt from."""
    loop = {key: value for key, value in candidate.recipe["loop"].items() if key != "out_dir"}
    question = [{**candidate.recipe, "loop": loop}, repr(candidate.space), asked.metric, asked.mode, asked.seeds]
    digest = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{candidate.name} {digest}"
