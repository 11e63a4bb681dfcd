"""What the commands share that make many runs: their arguments, and the run of each method with each seed."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_feddua.cli.recipe_classes import SECTIONS
from lightning_feddua.cli.recipes import find_recipe, load_recipe, merge, split_presets
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.experiments.jobs import Job
from lightning_feddua.experiments.plots import can_draw
from lightning_feddua.experiments.results import check_metric, load_methods
from lightning_feddua.metric_names import Mode

# What `feddua fit` with some arguments would run: the recipe with all defaults filled in.
Resolve = Callable[[list[str]], dict[str, Any]]

# What commands write beside the methods' folders.
_OURS = re.compile(r"best|.*\.(csv|html|journal|md|pdf|png|yaml)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ManyRuns:
    """The arguments of such a command, as :func:`add_many_runs_arguments` describes them."""

    config: Sequence[str]
    methods: Sequence[str] | None
    seeds: int
    jobs: int | None
    metric: str | None
    mode: Mode | None
    out: str | None
    overrides: list[str]

    def __post_init__(self) -> None:
        check_counts(seeds=self.seeds, jobs=self.jobs)

    def method_arguments(self) -> dict[str, list[str]]:
        """What each method would be as arguments of ``feddua fit``."""
        recipe: dict[str, Any] = {}
        for name in self.config:
            recipe = merge(recipe, load_recipe(find_recipe(name)))
        _, presets = split_presets(recipe)
        chosen = list(dict.fromkeys(self.methods or presets))
        if not chosen:
            raise ConfigurationError(
                f"The recipe `{self.config[-1]}` has no presets to compare.",
                "Name some servers, as in `--methods FedAvg FedDuAdam`.",
            )
        if any(re.match(r"--server(=|$)", argument) for argument in self.overrides):
            raise ConfigurationError(
                "`--server` was given to a comparison of servers.", "Choose them with `--methods`, or use `feddua fit`."
            )
        configs = [argument for name in self.config for argument in ("--config", name)]
        return {
            name: [*configs, "--preset" if name in presets else "--server", name, *self.overrides] for name in chosen
        }

    def root(self, recipe: dict[str, Any], folder: str) -> Path:
        """Where everything goes: by default to a folder of this name in the recipe's ``out_dir``."""
        return Path(self.out) if self.out is not None else Path(recipe["loop"]["out_dir"]) / folder

    def seeded_jobs(self, root: Path, method: str, recipe: dict[str, Any], setting: str = "") -> list[Job]:
        """A run for each seed."""
        return [seeded_job(root, method, recipe, offset, setting) for offset in range(self.seeds)]

    def check_logged(self, job: Job) -> None:
        """One clear error for a metric that a finished run has not logged."""
        if self.metric is not None:
            check_metric(load_methods([job.folder]), self.metric)


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
    add("--jobs", type=int | None, default=None, help="how many runs at once; one per device or core if left out")
    add(
        "--metric",
        type=str | None,
        default=None,
        help="what to judge by: the mean of its last five values, over seeds; if left out, `compare` shows all of"
        " validation, and `sweep` takes the first of them",
    )
    add(
        "--mode",
        type=Mode | None,
        default=None,
        help="whether the smallest or the largest value is best; a metric's name decides if left out",
    )
    add("--out", type=str | None, default=None, help=f"where everything goes; `{folder}` in the recipe's `out_dir`")
    add(
        "overrides",
        nargs="*",
        type=str,
        default=[],
        help="options of `feddua fit` for every run, as in --loop.max_rounds 50",
    )


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


def check_counts(**counts: int | None) -> None:
    """One clear error for an option that counts something and is less than 1."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"`--{name} {value}` is less than 1.", "Give a whole number from 1 up.")


def seeded_job(root: Path, method: str, recipe: dict[str, Any], offset: int, setting: str = "") -> Job:
    """A run with the recipe's seeds increased: that of the loop, and every one in the data.

    Args:
        root: the folder of all runs.
        method: what to call the recipe.
        recipe: resolved.
        offset: what is added to seeds.
        setting: what sets the recipe apart from others of its method, as in ``model.lr=0.1``.
    """
    recipe = copy.deepcopy(recipe)
    recipe["loop"]["seed"] += offset
    _move_seeds(recipe["data"], offset)
    seed = recipe["loop"]["seed"]
    folder = root / folder_name(method) / folder_name(",".join(filter(None, [setting, f"seed_{seed}"])))
    recipe["loop"]["out_dir"] = str(folder)
    return Job(" ".join(filter(None, [method, setting, f"seed {seed}"])), folder, recipe, method)


def folder_name(text: str) -> str:
    """A name for a method's or a run's folder, which any file system takes and which is no way to elsewhere.

    A name that had to be changed ends with a hash, so that no two are the same.

    >>> folder_name("model.lr=0.1,seed_0"), folder_name("data.path=a/b"), folder_name("..")
    ('model.lr=0.1,seed_0', 'data.path=a_b-8e9d84af', '_.-5ec1f7e7')
    """
    name = re.sub(r"^\.|[^\w.+=,-]", "_", text)
    # File systems count bytes.
    name = name.encode()[:150].decode(errors="ignore")
    if name == text and text and not _OURS.fullmatch(text):
        return name
    return f"{name}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"


def say_if_nothing_is_drawn() -> None:
    """Before the runs, while Matplotlib can still be installed."""
    if not can_draw():
        print('There will be no figure: run `pip install "lightning-feddua[plot]"` for Matplotlib.')


def _move_seeds(section: Any, offset: int) -> None:
    if isinstance(section, dict):
        for key, value in section.items():
            if key == "seed" and isinstance(value, int):
                section[key] = value + offset
            else:
                _move_seeds(value, offset)
