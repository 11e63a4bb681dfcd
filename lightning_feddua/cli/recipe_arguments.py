"""The recipe that a command line asks for: ``--config``, ``--preset``, ``--server`` and overrides."""

import itertools
import re
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser

from lightning_feddua._private import action_of
from lightning_feddua.cli.recipe_classes import (
    CLASSES_OF_LIGHTNING,
    SECTIONS,
    base_classes,
    check_arguments,
    check_recipe,
    check_required,
    import_named,
    section_class,
    shipped_classes,
)
from lightning_feddua.cli.recipes import find_recipe, load_recipe, merge, split_presets
from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.loop import FederatedLoop


def add_config_arguments(parser: ArgumentParser) -> None:
    """The recipe, for commands that run or describe one."""
    parser.add_argument(
        "--config", action=ActionConfigFile, help="a recipe: a YAML file, or the name of a shipped recipe"
    )
    # Taken out of the command line before it is parsed; here for the help.
    parser.add_argument("--preset", type=str, default=SUPPRESS, help="one of the recipe's presets")


def add_section(parser: ArgumentParser, section: str, default: str | None = None) -> None:
    """A section of a recipe that chooses a class.

    Args:
        parser: the command's.
        section: its name.
        default: the import path of the class that is chosen if the section is left out; None if it must be given.
    """
    base = SECTIONS[section]
    chosen = None if default is None else {"class_path": default}
    # Arguments without a type are passed on as they are written.
    bases = base_classes(base)
    parser.add_subclass_arguments(bases, section, required=default is None, default=chosen, fail_untyped=False)
    action = action_of(parser, section)
    # Instead of all classes that are known, also those that cannot run, with their import paths.
    names = ", ".join(sorted(shipped_classes(base)))
    action.extra_help = lambda: f", one of: {names}; or an import path"


def resolve_recipe(arguments: list[str], sections: Sequence[str]) -> list[str]:
    """Replace the recipe that ``--config`` names by the text of some sections, with the preset that is asked for.

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
    recipe = {section: value for section, value in recipe.items() if section in sections}
    _check_sections(recipe, sections, given.get("--config", []), rest)
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


def _check_sections(recipe: dict[str, Any], sections: Sequence[str], files: list[str], arguments: list[str]) -> None:
    """One clear error for a recipe that lacks a section which has no default."""
    for section in ("model", "data"):
        given = section in recipe or any(re.match(rf"--{section}\b", one) for one in arguments)
        if files and section in sections and not given and not {"--help", "-h"}.intersection(arguments):
            raise ConfigurationError(
                f"The recipe `{files[-1]}` has no section `{section}`.", f"Add it, or give `--{section} CLASS`."
            )


def _check_overrides(recipe: dict[str, Any], arguments: list[str]) -> None:
    """One clear error for ``--section.name`` where the section's class has no such argument."""
    for section in SECTIONS:
        chosen = _take_options(arguments, (f"--{section}",))[0].get(f"--{section}", [recipe.get(section)])[-1]
        by_path = _take_options(arguments, (f"--{section}.class_path",))[0].get(f"--{section}.class_path", [])
        if by_path or (isinstance(chosen, str) and chosen.startswith(("{", "null"))):
            _import(by_path[-1] if by_path else chosen)
            continue
        pattern = re.compile(rf"--{section}\.(?:init_args\.)?(?!class_path\b|help\b|init_args\b)(\w+)")
        names = [match[1] for argument in arguments if (match := pattern.match(argument))]
        if chosen is not None:
            cls, _ = section_class(section, chosen)
            check_arguments(section, cls, names)
            known = recipe.get(section)
            inherited = known.get("init_args") or {} if isinstance(known, dict) else {}
            check_required(section, cls, {*names, *inherited})
    names = [match[1] for argument in arguments if (match := re.match(r"--loop\.(\w+)", argument))]
    check_arguments("loop", FederatedLoop, names)
    for name in CLASSES_OF_LIGHTNING:
        options = [f"--loop.{name}{end}" for end in ("", "+", ".class_path")]
        for value in itertools.chain(*_take_options(arguments, options)[0].values()):
            _import(value)


def _import(chosen: Any) -> None:
    """Import the classes that an import path, or a section in JSON, names; the parser says what is wrong with them."""
    with suppress(yaml.YAMLError):
        import_named(yaml.safe_load(chosen))
