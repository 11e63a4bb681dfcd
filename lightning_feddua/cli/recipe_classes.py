"""The classes and arguments that a recipe names: which there are, and one clear error for any other."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from lightning import LightningModule

from lightning_feddua.clients import LocalTraining
from lightning_feddua.data import FederatedDataModule
from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.loop import FederatedLoop
from lightning_feddua.models import Classifier
from lightning_feddua.servers import Server

# Sections of a recipe that choose a class, and the class each choice derives from.
SECTIONS: dict[str, type] = {
    "server": Server,
    "client": LocalTraining,
    "model": LightningModule,
    "data": FederatedDataModule,
}
LOOP_SKIPS = {"server", "client"}
# Bases that no recipe can choose: they lack something that a subclass has, or that Python alone can give them.
_FOR_SUBCLASSES = (FederatedDataModule, Classifier)
# Further keys of a recipe.
BASE = "base"
PRESETS = "presets"


def check_recipe(recipe: Mapping[str, Any]) -> None:
    """One clear error for a section, class or argument that does not exist."""
    if BASE in recipe:
        raise ConfigurationError("A preset has a `base`.", "Give the recipe one, outside of its presets.")
    _check_names("The recipe", recipe, [*SECTIONS, "loop", PRESETS, BASE], "section")
    for section in SECTIONS.keys() & recipe.keys():
        cls, arguments = section_class(section, recipe[section])
        check_arguments(section, cls, arguments)
    loop = recipe.get("loop", {})
    if not isinstance(loop, Mapping):
        raise ConfigurationError(f"The recipe's `loop` is `{loop}`.", "Give a mapping of the loop's settings.")
    check_arguments("loop", FederatedLoop, loop)


def section_class(section: str, value: Any) -> tuple[type, Mapping[str, Any]]:
    """The class that a section chooses, and its arguments."""
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        raise ConfigurationError(
            f"The recipe's `{section}` does not choose a class.", "Give it a `class_path` and, if need be, `init_args`."
        )
    _check_names(f"The recipe's `{section}`", value, ["class_path", "init_args"], "key")
    arguments = value.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise ConfigurationError(
            f"The recipe's `{section}.init_args` is `{arguments}`.", "Give a mapping of arguments."
        )
    return find_class(section, value["class_path"]), arguments


def find_class(section: str, class_path: str) -> type:
    """A class by its import path or, if this package has it, by its name."""
    base = SECTIONS[section]
    known = shipped_classes(base)
    if class_path in known:
        return known[class_path]
    cls = import_class(class_path)
    if cls is not None and not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigurationError(f"`{class_path}` is not a `{base.__name__}`.", f"Choose one of {choices(known)}.")
    if cls is None:
        raise ConfigurationError(*no_such_class(section, class_path, base))
    if inspect.isabstract(cls):
        raise ConfigurationError(f"`{class_path}` is abstract.", f"Choose a subclass, or one of {choices(known)}.")
    return cls


def shipped_classes(base: type) -> dict[str, type]:
    """This package's classes of a kind that a recipe can choose, by name."""
    return {
        cls.__name__: cls
        for cls in _subclasses(base)
        if cls.__module__.startswith("lightning_feddua.")
        and not cls.__name__.startswith("_")
        and not inspect.isabstract(cls)
        and cls not in _FOR_SUBCLASSES
    }


def no_such_class(kind: str, class_path: str, base: type) -> tuple[str, str]:
    """What to say where a name is not that of a class."""
    known = shipped_classes(base)
    return (
        f"There is no {kind} `{class_path}`.",
        f"{hint(class_path, known)}hoose one of {choices(known)}, or give the import path of a `{base.__name__}`.",
    )


def import_class(class_path: str) -> Any:
    """What an import path names, or None if there is no such module or name in it."""
    module, _, name = class_path.rpartition(".")
    if not module:
        return None
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise ConfigurationError(f"Importing `{module}` failed: {error}.", "Install what it needs.") from error
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigurationError(f"Importing `{module}` failed: {problem}.", "Fix the module.") from error


def check_arguments(section: str, cls: type, arguments: Iterable[str]) -> None:
    """One clear error for an argument that a class does not take."""
    try:
        parameters = inspect.signature(cls).parameters
    except ValueError:
        # Of a class that is not written in Python nothing is known.
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    allowed = [name for name in parameters if section != "loop" or name not in LOOP_SKIPS]
    _check_names(f"`{section}`, a `{cls.__name__}`,", arguments, allowed, "argument")
    if isinstance(arguments, Mapping):
        for name, value in arguments.items():
            if value is None and not _may_be_none(parameters[name]):
                raise ConfigurationError(
                    f"`{section}.{name}` cannot be null.", "Leave it out for its default, or give a value."
                )
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Mapping) and isinstance(one.get("class_path"), str):
                    inner = import_class(one["class_path"])
                    if isinstance(inner, type):
                        check_arguments(f"{section}.{name}", inner, one.get("init_args") or {})


def _may_be_none(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation if isinstance(parameter.annotation, str) else repr(parameter.annotation)
    unknown = parameter.annotation is inspect.Parameter.empty
    return unknown or parameter.default is None or any(word in kind for word in ("None", "Optional", "Any"))


def _check_names(owner: str, given: Iterable[str], allowed: list[str], kind: str) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigurationError(
                f"{owner} has no {kind} `{name}`.", f"{hint(name, allowed)}hoose among {choices(allowed)}."
            )


def hint(name: str, allowed: Iterable[str], initial: str = "c") -> str:
    """The beginning of a sentence, up to the first letter of the word that follows it, such as "choose"."""
    near = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f"Write `{near[0]}` if that was meant, or {initial}" if near else initial.upper()


def _subclasses(base: type) -> set[type]:
    derived: list[type] = base.__subclasses__()
    return {base}.union(*(_subclasses(cls) for cls in derived))
