"""``feddua fit``: a recipe's run."""

from __future__ import annotations

import inspect
from argparse import SUPPRESS
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning import LightningModule
from lightning.fabric.utilities.seed import seed_everything

from lightning_feddua._private import action_of, set_type
from lightning_feddua.callbacks import FederatedCallback
from lightning_feddua.cli.construction import make
from lightning_feddua.cli.recipe_arguments import add_config_arguments, add_section
from lightning_feddua.cli.recipe_classes import CLASSES_OF_LIGHTNING, LOOP_SKIPS, SECTIONS, with_twins
from lightning_feddua.data import FederatedDataModule
from lightning_feddua.experiments.results import flattened
from lightning_feddua.files import whole_file
from lightning_feddua.launch.run_folders import RECIPE_FILE
from lightning_feddua.loop import FederatedLoop

_DEFAULTS = {"server": "lightning_feddua.FedDuAdagrad", "client": "lightning_feddua.LocalTraining"}


class SaveRecipe(FederatedCallback):
    """Writes the resolved recipe into the run's folder, so that the run can be repeated from it.

    Args:
        text: the recipe.
    """

    FILE_NAME = RECIPE_FILE

    def __init__(self, text: str) -> None:
        self._text = text
        # What else makes the result is compared by its effect, wherever it comes from.
        self.identity = dict(flattened(yaml.safe_load(text)["model"], "model"))

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Write it, on rank 0."""
        if loop.fabric.is_global_zero:
            with whole_file(loop.run_dir / self.FILE_NAME) as file:
                file.write(self._text)

    def state_dict(self) -> dict[str, Any]:
        """The recipe, for whoever finds a checkpoint alone."""
        return {"recipe": self._text}


def add_recipe_arguments(parser: ArgumentParser) -> None:
    """A recipe, and all that it can have in it."""
    add_config_arguments(parser)
    for section in SECTIONS:
        add_section(parser, section, _DEFAULTS.get(section))
    add_loop_arguments(parser)
    # Lightning's own class has no words for it.
    (parser.groups or {})["model"].title = "Any LightningModule"


def add_fit_arguments(parser: ArgumentParser) -> None:
    """What ``feddua fit`` takes."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--ckpt_path",
        type=str,
        # What is not given is not printed by `--print_config` either: it is no part of a recipe.
        default=SUPPRESS,
        help="a checkpoint to resume from; `last` for the newest run in `loop.out_dir` that has one",
    )


def add_loop_arguments(parser: ArgumentParser) -> None:
    """The loop's settings."""
    parser.add_class_arguments(FederatedLoop, "loop", skip=LOOP_SKIPS, instantiate=False)
    known = inspect.signature(FederatedLoop).parameters
    for name in CLASSES_OF_LIGHTNING:
        # Unless somebody has imported the other package, there is nothing to change.
        if name in known and (kind := with_twins(known[name].annotation)) != known[name].annotation:
            set_type(action_of(parser, f"loop.{name}"), kind)


def fit(parser: ArgumentParser, config: Namespace) -> None:
    """Run it."""
    ckpt_path = config.pop("ckpt_path", None)
    recipe = resolved_text(parser, config)
    loop, model, data = make_run(parser, config, SaveRecipe(recipe))
    loop.fit(model, data, ckpt_path)


def make_run(
    parser: ArgumentParser, config: Namespace, *callbacks: FederatedCallback
) -> tuple[FederatedLoop, LightningModule, FederatedDataModule]:
    """The loop, the model and the data that a command line describes.

    Args:
        parser: the command's.
        config: what it has parsed.
        *callbacks: for the loop, behind the recipe's own.
    """
    # Before anything random is made: the model's initial weights belong to the run's seed.
    seed_everything(config.loop.seed % 2**32, verbose=False)
    made = make(parser, config)
    settings = dict(vars(made.loop))
    given = settings.pop("callbacks") or []
    settings["callbacks"] = [*(given if isinstance(given, list) else [given]), *callbacks]
    return FederatedLoop(server=made.server, client=made.client, **settings), made.model, made.data


def resolved_text(parser: ArgumentParser, config: Namespace) -> str:
    """The recipe with all defaults filled in."""
    config.pop("preset", None)
    config.pop("ckpt_path", None)
    return parser.dump(config, skip_none=False, skip_validation=True)
