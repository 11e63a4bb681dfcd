"""``feddua fit``: a recipe's run."""

from __future__ import annotations

from argparse import SUPPRESS
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.seed import seed_everything

from lightning_feddua.callbacks import FederatedCallback
from lightning_feddua.cli.recipe_arguments import add_config_arguments, add_section
from lightning_feddua.cli.recipe_classes import LOOP_SKIPS, SECTIONS
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

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Write it, on rank 0."""
        if loop.fabric.is_global_zero:
            (loop.run_dir / self.FILE_NAME).write_text(self._text)

    def state_dict(self) -> dict[str, Any]:
        """The recipe, for whoever finds a checkpoint alone."""
        return {"recipe": self._text}


def add_fit_arguments(parser: ArgumentParser) -> None:
    """What ``feddua fit`` takes: a recipe, and all that it can have in it."""
    add_config_arguments(parser)
    for section in SECTIONS:
        add_section(parser, section, _DEFAULTS.get(section))
    add_loop_arguments(parser)
    # Lightning's own class has no words for it.
    (parser.groups or {})["model"].title = "Any LightningModule"
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


def fit(parser: ArgumentParser, config: Namespace) -> None:
    """Run it."""
    ckpt_path = config.pop("ckpt_path", None)
    recipe = resolved_text(parser, config)
    # Before anything random is made: the model's initial weights belong to the run's seed.
    seed_everything(config.loop.seed % 2**32, verbose=False)
    made = parser.instantiate(config)
    settings = dict(vars(made.loop))
    callbacks = settings.pop("callbacks") or []
    settings["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), SaveRecipe(recipe)]
    loop = FederatedLoop(server=made.server, client=made.client, **settings)
    loop.fit(made.model, made.data, ckpt_path)


def resolved_text(parser: ArgumentParser, config: Namespace) -> str:
    """The recipe with all defaults filled in."""
    config.pop("preset", None)
    config.pop("ckpt_path", None)
    return parser.dump(config, skip_none=False, skip_validation=True)
