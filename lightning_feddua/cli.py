"""The command line: ``feddua fit``."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning.fabric.utilities.seed import seed_everything

from lightning_feddua.__about__ import __version__
from lightning_feddua.callbacks import FederatedCallback
from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.loop import FederatedLoop
from lightning_feddua.recipes import (
    LOOP_SKIPS,
    SECTIONS,
    check_arguments,
    check_recipe,
    find_recipe,
    load_recipe,
    merge,
    section_class,
    split_presets,
)


class SaveRecipe(FederatedCallback):
    """Writes the resolved recipe into the run's folder, so that the run can be repeated from it.

    Args:
        text: the recipe.
    """

    FILE_NAME = "recipe.yaml"

    def __init__(self, text: str) -> None:
        self._text = text

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Write it, on rank 0."""
        if loop.fabric.is_global_zero:
            (loop.run_dir / self.FILE_NAME).write_text(self._text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 2 for bad input, or 130 when interrupted; other errors are raised."""
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except ConfigurationError as error:
        print(f"feddua: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("feddua: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(arguments: list[str]) -> None:
    parser, fit_parser = _parsers()
    if arguments[:1] == ["fit"]:
        arguments = ["fit", *_resolve_recipe(arguments[1:])]
    try:
        config = parser.parse_args(arguments)
    except ArgumentError as error:
        raise ConfigurationError(*_sentences(error)) from error
    _fit(fit_parser, config.fit)


def _parsers() -> tuple[ArgumentParser, ArgumentParser]:
    parser = ArgumentParser(
        prog="feddua",
        description="Federated learning for PyTorch Lightning, with FedDuA's server.",
        version=__version__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    commands = parser.add_subcommands(required=True)
    fit = ArgumentParser(
        description="Train a recipe's model over its clients. `--preset NAME` applies one of the recipe's presets;"
        " `--server NAME` does so, too, where the recipe has one of this name.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    fit.add_argument("--config", action=ActionConfigFile, help="a recipe: a YAML file, or the name of a shipped recipe")
    for section, base in SECTIONS.items():
        required = section in ("model", "data")
        fit.add_subclass_arguments(base, section, required=required, default=None if required else _default(section))
    fit.add_class_arguments(FederatedLoop, "loop", skip=LOOP_SKIPS, instantiate=False)
    commands.add_subcommand("fit", fit, help="train a recipe's model over its clients")
    return parser, fit


def _default(section: str) -> dict[str, str]:
    name = {"server": "FedDuAdagrad", "client": "LocalTraining"}[section]
    return {"class_path": f"lightning_feddua.{name}"}


def _fit(parser: ArgumentParser, config: Namespace) -> None:
    recipe = parser.dump(config, skip_none=False)
    # Before anything random is made: the model's initial weights belong to the run's seed.
    seed_everything(config.loop.seed, verbose=False)
    made = parser.instantiate(config)
    settings = dict(vars(made.loop))
    callbacks = settings.pop("callbacks") or []
    settings["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), SaveRecipe(recipe)]
    loop = FederatedLoop(server=made.server, client=made.client, **settings)
    loop.fit(made.model, made.data)


def _resolve_recipe(arguments: list[str]) -> list[str]:
    """Replace the recipe that ``--config`` names by its text, with the preset that is asked for.

    Names that do not exist are found here, where it is known what is allowed.
    """
    given, rest = _take_options(arguments, ("--config", "--preset"))
    server = _take_options(rest, ("--server",))[0].get("--server", [None])[-1]
    recipe: dict[str, Any] = {}
    for name in given.get("--config", []):
        recipe = merge(recipe, load_recipe(find_recipe(name)))
    recipe, presets = split_presets(recipe)
    preset = given.get("--preset", [None])[-1]
    if preset is None and server in presets:
        preset = server
        rest = _take_options(rest, ("--server",))[1]
    if preset is not None:
        if preset not in presets:
            allowed = f"Choose one of {choices(presets)}." if presets else "Leave `--preset` out: the recipe has none."
            raise ConfigurationError(f"The recipe has no preset `{preset}`.", allowed)
        recipe = merge(recipe, presets[preset])
    check_recipe(recipe)
    _check_overrides(recipe, rest)
    return ["--config", yaml.safe_dump(recipe), *rest] if recipe else rest


def _take_options(arguments: list[str], names: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Values of some options, given as ``--name value`` or ``--name=value``, and all other arguments."""
    taken: dict[str, list[str]] = {}
    rest = []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name not in names:
            rest.append(argument)
            continue
        if not equals and (value := next(waiting, "")) == "":
            raise ConfigurationError(f"`{name}` has no value.", f"Write `{name} VALUE`.")
        taken.setdefault(name, []).append(value)
    return taken, rest


def _check_overrides(recipe: dict[str, Any], arguments: list[str]) -> None:
    """One clear error for ``--section.name`` where the section's class has no such argument."""
    for section in SECTIONS:
        chosen = _take_options(arguments, (f"--{section}",))[0].get(f"--{section}", [recipe.get(section)])[-1]
        if isinstance(chosen, str) and chosen.startswith(("{", "null")):
            continue
        pattern = re.compile(rf"--{section}\.(?:init_args\.)?(?!class_path\b|help\b|init_args\b)(\w+)")
        names = [match[1] for argument in arguments if (match := pattern.match(argument))]
        if chosen is not None:
            cls, _ = section_class(section, chosen)
            check_arguments(section, cls, names)
    names = [match[1] for argument in arguments if (match := re.match(r"--loop\.(\w+)", argument))]
    check_arguments("loop", FederatedLoop, names)


def _sentences(error: ArgumentError) -> tuple[str, str]:
    """What jsonargparse says over many lines, in one."""
    text = str(error)
    if match := re.search(r'Parser key "([\w.]+)"(?!.*Parser key)', text, re.DOTALL):
        value = re.search(r"(?:Given value|Got value): (.*)", text)
        expected = dict.fromkeys(re.findall(r"Expected an? (?:<class '([\w.]+)'>|([\w.\[\]', ]+))", text))
        kinds = " or ".join("none" if a == "NoneType" else a or b for a, b in expected)
        if value and kinds:
            return f"`{match[1]}` cannot be `{value[1]}`.", f"Give a value of type {kinds}."
    return f"The command line cannot be read: {' '.join(text.split()).rstrip('.')}.", "See `feddua fit --help`."
