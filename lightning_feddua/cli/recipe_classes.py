"""The classes and arguments that a recipe names: which there are, and one clear error for any other."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin

from lightning import Callback, LightningModule
from lightning.fabric.loggers import Logger

from lightning_feddua.argument_names import loop_argument
from lightning_feddua.cli.recipes import BASE, PRESETS, SECTION_NAMES
from lightning_feddua.clients import LocalTraining
from lightning_feddua.data import FederatedDataModule
from lightning_feddua.data.wrapped import PredictedDataModule, WrappedDataModule
from lightning_feddua.errors import ConfigurationError, choices, hint, instead_of
from lightning_feddua.lightning_names import lightning_classes
from lightning_feddua.loop import FederatedLoop
from lightning_feddua.models import Classifier
from lightning_feddua.servers import Server

# Sections of a recipe that choose a class, and the class each choice derives from.
SECTIONS: dict[str, type] = dict(
    zip(SECTION_NAMES, (Server, LocalTraining, LightningModule, FederatedDataModule), strict=True)
)
LOOP_SKIPS = {"server", "client"}
# Settings of the loop that may be of either of Lightning's packages.
CLASSES_OF_LIGHTNING = ("callbacks", "loggers")
# Bases that no recipe can choose: they lack something that a subclass has, or that Python alone can give them.
_FOR_SUBCLASSES = (FederatedDataModule, PredictedDataModule, WrappedDataModule, Classifier)


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
    _check_names(f"The recipe's `{section}`", value, ["class_path", "init_args", "dict_kwargs"], "key")
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
    if cls is not None and not (isinstance(cls, type) and issubclass(cls, base_classes(base))):
        if section == "data" and isinstance(cls, type) and issubclass(cls, lightning_classes("LightningDataModule")):
            raise ConfigurationError(
                f"`{class_path}` has no clients.",
                f"Split its data: `--data PartitionedDataModule --data.datamodule {class_path} --data.partitioner"
                " IIDPartitioner --data.partitioner.num_clients 10`, or another partitioner.",
            )
        raise ConfigurationError(f"`{class_path}` is not a `{base.__name__}`.", f"Choose one of {choices(known)}.")
    if cls is None:
        raise ConfigurationError(*no_such_class(section, class_path, base))
    if inspect.isabstract(cls):
        raise ConfigurationError(f"`{class_path}` is abstract.", f"Choose a subclass, or one of {choices(known)}.")
    return cls


def import_named(value: Any) -> None:
    """Import all classes that a value from YAML names, so that what they derive from is known."""
    for one in value if isinstance(value, list) else [value]:
        path = one.get("class_path") if isinstance(one, Mapping) else one
        if isinstance(path, str) and path.replace(".", "").isidentifier():
            import_class(path)


def with_twins(kind: Any) -> Any:
    """A type in which a class of Lightning's also stands for its twin, where somebody has imported that."""
    if kind in (Callback, Logger):
        # Loggers derive from Fabric's, of which there are two as well.
        name = "Callback" if kind is Callback else "loggers.Logger"
        twins = (cls for cls in lightning_classes(name) if not issubclass(cls, kind))
        return Union[(kind, *twins)]  # noqa: UP007
    inner = tuple(with_twins(one) for one in get_args(kind))
    if not inner or inner == get_args(kind):
        return kind
    return Union[inner] if get_origin(kind) in (Union, UnionType) else get_origin(kind)[inner]  # noqa: UP007


def base_classes(base: type) -> tuple[type, ...]:
    """A base class, and its twin where Lightning has one in each of its packages."""
    return tuple(dict.fromkeys((base, *lightning_classes(base.__name__)))) if base is LightningModule else (base,)


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
    module, _, name = class_path.rpartition(".")
    if module and all(part.isidentifier() for part in class_path.split(".")):
        found = sys.modules.get(module)
        if found is None:
            return f"There is no module `{module}`.", f"Give the import path of a `{base.__name__}`."
        own = [one for one, value in vars(found).items() if isinstance(value, type)]
        near = difflib.get_close_matches(name, own, n=1)
        meant = f"Write `{module}.{near[0]}` if that was meant." if near else "Give the name of a class in it."
        return f"`{module}` has no `{name}`.", meant
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
    advice = loop_argument if section == "loop" else instead_of
    allowed = [name for name in parameters if section != "loop" or name not in LOOP_SKIPS]
    _check_names(f"`{section}`, a `{cls.__name__}`,", arguments, allowed, "argument", advice)
    if isinstance(arguments, Mapping):
        for name, value in arguments.items():
            if value is None and not _may_be_none(parameters[name]):
                raise ConfigurationError(
                    f"`{section}.{name}` cannot be null.", "Leave it out for its default, or give a value."
                )
            if section == "loop":
                import_named(value)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Mapping) and isinstance(one.get("class_path"), str):
                    inner = import_class(one["class_path"])
                    if isinstance(inner, type):
                        check_arguments(f"{section}.{name}", inner, one.get("init_args") or {})


def check_required(section: str, cls: type, given: Collection[str]) -> None:
    """One clear error for an argument without a type that is not given: jsonargparse would take it to be None."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except ValueError:
        return
    for one in parameters:
        untyped = one.annotation is one.empty and one.default is one.empty
        if untyped and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in given:
            raise ConfigurationError(
                f"`{cls.__name__}` needs `{one.name}`.", f"Give it, as in `--{section}.{one.name} VALUE`."
            )


def _may_be_none(parameter: inspect.Parameter) -> bool:
    kind = parameter.annotation if isinstance(parameter.annotation, str) else repr(parameter.annotation)
    unknown = parameter.annotation is inspect.Parameter.empty
    return unknown or parameter.default is None or any(word in kind for word in ("None", "Optional", "Any"))


def _check_names(
    owner: str,
    given: Iterable[str],
    allowed: list[str],
    kind: str,
    advice: Callable[[str, Iterable[str]], str] = instead_of,
) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigurationError(f"{owner} has no {kind} `{name}`.", advice(name, allowed))


def _subclasses(base: type) -> set[type]:
    derived: list[type] = base.__subclasses__()
    return {base}.union(*(_subclasses(cls) for cls in derived))
