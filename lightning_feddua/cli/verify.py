"""``feddua verify``: whether a finished run can be repeated."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_feddua.certificates.verification import verify_run
from lightning_feddua.cli.fit import SaveRecipe, add_recipe_arguments, make_run, resolved_text
from lightning_feddua.cli.recipe_arguments import resolve_recipe
from lightning_feddua.cli.recipe_classes import SECTIONS
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.launch.run_folders import RECIPE_FILE, newest_version


def add_verify_arguments(parser: ArgumentParser) -> None:
    """What ``feddua verify`` takes."""
    parser.add_argument("run", type=str, help="the folder of a run, or one with runs in it for the newest")
    parser.add_argument("--rounds", type=int, default=3, help="how many rounds, chosen at random, are repeated")
    parser.add_argument("--seed", type=int, default=0, help="the seed of that choice")
    add_recipe_arguments(parser)


def take_recipe(arguments: list[str]) -> list[str]:
    """The arguments with the recipe that the run has saved."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    folder = Path(arguments[0])
    if not (folder / RECIPE_FILE).is_file():
        folder = newest_version(folder) or folder
    recipe = folder / RECIPE_FILE
    if not recipe.is_file():
        raise ConfigurationError(
            f"There is no run in `{folder}` that has saved its `{RECIPE_FILE}`.",
            "Give the folder of a run of `feddua fit`; for a run of your own script, call"
            " `lightning_feddua.certificates.verify_run`.",
        )
    return [str(folder), *resolve_recipe(["--config", str(recipe), *arguments[1:]], [*SECTIONS, "loop"])]


def verify(parser: ArgumentParser, config: Namespace) -> int:
    """Repeat some rounds; 0 if they are the same, 1 if not."""
    folder, rounds, seed = config.pop("run"), config.pop("rounds"), config.pop("seed")
    if rounds < 1:
        raise ConfigurationError(f"`--rounds {rounds}` leaves nothing to repeat.", "Give 1 or more.")
    config.loop.enable_progress_bar = config.loop.tensorboard = False
    loop, model, data = make_run(parser, config, SaveRecipe(resolved_text(parser, config)))

    def tell(line: str) -> None:
        if loop.fabric.is_global_zero:
            print(line, flush=True)

    found = verify_run(loop, model, data, folder, rounds, seed, tell)
    tell(str(found))
    return 1 if found.problems else 0
