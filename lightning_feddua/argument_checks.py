"""Checks of the loop's arguments: each raises one clear error for a value that is not allowed."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_feddua.callbacks.lightning import is_callback
from lightning_feddua.checks import check_choice, check_instance, check_whole
from lightning_feddua.engines.base import AUTO, find_engine
from lightning_feddua.errors import ConfigurationError

Check = Callable[[str, Any], None]


def whole(least: int) -> Check:
    """A whole number, not less than this one."""
    return partial(check_whole, least=least)


def one_of(*allowed: str) -> Check:
    """One of some words."""
    return partial(check_choice, allowed=allowed)


def flag_or(word: str) -> Check:
    """True, False or one word."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool) and value != word:
            raise ConfigurationError(f"`{name}={value}` is not known.", f"Choose True, False or `{word}`.")

    return check


def instance_of(kind: type) -> Check:
    """An object of a class."""
    return partial(check_instance, kind=kind)


def each_instance_of(kind: type) -> Check:
    """An object of a class, or a list of such objects."""

    def check(name: str, value: Any) -> None:
        for one in value if isinstance(value, list | tuple) else [value]:
            check_instance(name.removesuffix("s"), one, kind)

    return check


def check_callbacks(name: str, value: Any) -> None:
    """A callback, or a list of them."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if not is_callback(one):
            raise ConfigurationError(
                f"The callback is `{one!r:.100}`.",
                "Give a `FederatedCallback` or a `Callback` of Lightning's.",
            )


def check_loggers(name: str, value: Any) -> None:
    """A logger, or a list of them."""
    for one in value if isinstance(value, list | tuple) else [value]:
        # Loggers have no base class that is the same in all of Lightning's packages.
        if isinstance(one, type) or not hasattr(one, "log_metrics"):
            raise ConfigurationError(
                f"The logger is `{one!r:.100}`.",
                "Give a logger of Fabric's or Lightning's, or leave `loggers` out; `metrics.csv` is always written.",
            )


def of_fabric(kind: type) -> Check:
    """What Fabric takes: a name, or an object of its own class."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str | int | kind):
            problem = f"Fabric does not take the {name} `{type(value).__module__}.{type(value).__name__}`."
            raise ConfigurationError(problem, f"Give Fabric's, from `{kind.__module__.rpartition('.')[0]}`.")

    return check


def check_engine(name: str, value: Any) -> None:
    """``"auto"``, or an engine that exists."""
    if value != AUTO:
        find_engine(value)
