"""Recipes: YAML files that name a model, its data, a server and the loop's settings, or what they change in another.

A recipe is code: it names classes, and these are imported and made. Nothing else is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_feddua.errors import ConfigurationError, choices, hint, instead_of
from lightning_feddua.plain_yaml import load_yaml

# Sections of a recipe that choose a class; the loop's settings are another.
SECTION_NAMES = ("server", "client", "model", "data")
# Further keys of a recipe.
BASE = "base"
PRESETS = "presets"


class _DuplicateKeyError(Exception):
    """A mapping has a key twice."""


class _UniqueKeys(yaml.SafeLoader):
    """Plain values, with an error for a key that is given twice: YAML would silently take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # As written: later on a mapping also has the keys of those that are merged into it.
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                where = f"in line {line}" if first == line else f"in line {first} and in line {line}"
                raise _DuplicateKeyError(f"`{key.value}` {where}")
            lines[key.value] = line
        return node


def recipe_dirs() -> list[Path]:
    """Where shipped recipes are: inside the installed package, or beside it in a checkout of this project."""
    package = Path(__file__).parents[1]
    project = package.parent / "pyproject.toml"
    checkout = project.is_file() and 'name = "lightning-feddua"' in project.read_text(encoding="utf-8")
    folders = [package / "recipes", *([package.parent / "recipes"] if checkout else [])]
    return [folder for folder in folders if folder.is_dir()]


def shipped_recipes() -> dict[str, Path]:
    """Shipped recipes by name."""
    return {path.stem: path for folder in recipe_dirs() for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe given by a path, or by the name of a shipped one."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    raise ConfigurationError(
        f"The recipe `{name_or_path}` does not exist.",
        f"{hint(name_or_path, shipped, 'g')}ive the path of a YAML file, or the name of a shipped recipe:"
        f" {choices(shipped)}.",
    )


def load_recipe(path: Path, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The content of a recipe file, merged into that of its ``base`` if it names one.

    Args:
        path: the file.
        heirs: the recipes that have led here, each the base of the one before.
    """
    try:
        content = load_yaml(path, _UniqueKeys)
    except _DuplicateKeyError as error:
        raise ConfigurationError(f"The recipe `{path}` has the same key twice: {error}.", "Keep one of them.") from None
    except ValueError as error:
        raise ConfigurationError(f"The recipe `{path}` is not valid YAML: {error}.", "Fix the file.") from error
    except OSError as error:
        raise ConfigurationError(f"The recipe `{path}` cannot be read: {error.strerror}.", "Fix the file.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"The recipe `{path}` holds a {type(content).__name__}, not a mapping.",
            f"Give it the sections {choices([*SECTION_NAMES, 'loop'])}.",
        )
    if BASE not in content:
        return content
    base = _find_base(content.pop(BASE), path)
    heirs = (*heirs, path.resolve())
    if base.resolve() in heirs:
        chain = " → ".join(one.name for one in (*heirs, base))
        raise ConfigurationError(f"The recipe `{path}` is its own base: {chain}.", "Remove one of these `base` keys.")
    return _inherit(load_recipe(base, heirs), content, path)


def _find_base(name: Any, heir: Path) -> Path:
    """The file of a recipe's base, which is given by a path relative to the recipe, or by the name of a shipped one."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"The `base` of the recipe `{heir}` is `{name}`.", "Give the name of a shipped recipe, or a path."
        )
    beside, shipped = heir.parent / name, shipped_recipes()
    if beside.is_file():
        return beside
    if name in shipped:
        return shipped[name]
    raise ConfigurationError(
        f"The recipe `{heir}` has a base `{name}`, which does not exist.",
        f"{hint(name, shipped, 'g')}ive a path relative to the recipe, or the name of a shipped recipe:"
        f" {choices(shipped)}.",
    )


def _inherit(base: dict[str, Any], own: dict[str, Any], path: Path) -> dict[str, Any]:
    """A recipe merged into its base; sections and presets that are null are removed."""
    _, known = split_presets(base)
    presets = own.get(PRESETS)
    _check_removed("section", own, base, path)
    _check_removed("preset", presets if isinstance(presets, dict) else {}, known, path)
    merged = _without_nulls(merge(base, own))
    if isinstance(merged.get(PRESETS), dict):
        left = _without_nulls(merged[PRESETS])
        merged[PRESETS] = {
            name: _without_nulls(preset) if isinstance(preset, dict) else preset for name, preset in left.items()
        }
    return merged


def _check_removed(kind: str, own: Mapping[str, Any], base: Mapping[str, Any], path: Path) -> None:
    for name, value in own.items():
        if value is None and name not in base:
            raise ConfigurationError(
                f"The recipe `{path}` removes the {kind} `{name}`, which its base does not have.",
                instead_of(name, base) if base else "Leave it out.",
            )


def _without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not None}


def split_presets(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe without its presets, and the presets."""
    presets = recipe.get(PRESETS) or {}
    if not isinstance(presets, dict) or not all(isinstance(preset, dict) for preset in presets.values()):
        raise ConfigurationError(
            "The recipe's `presets` are not mappings.", "Give each preset sections like a recipe's."
        )
    return {key: value for key, value in recipe.items() if key != PRESETS}, presets


def merge(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with some values changed. A section that changes its class starts from that class's defaults."""
    merged = dict(recipe)
    for key, value in changes.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            other_class = value.get("class_path", known.get("class_path")) != known.get("class_path")
            merged[key] = dict(value) if other_class else merge(known, value)
        else:
            merged[key] = value
    return merged
