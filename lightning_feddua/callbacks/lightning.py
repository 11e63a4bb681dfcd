"""Lightning's callbacks, of both its packages: which are called as they are, and what the others become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.lightning_refusals import REFUSED
from lightning_feddua.callbacks.translated import LightningCallback, Rates, RoundCheckpoint, RoundTimer, StoppedEarly
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.lightning_names import lightning_classes

# What the loop does itself, over rounds.
TRANSLATED: dict[str, type[Any]] = {
    "EarlyStopping": StoppedEarly,
    "ModelCheckpoint": RoundCheckpoint,
    "Timer": RoundTimer,
    "LearningRateMonitor": Rates,
}
# What the loop has something of its own for.
IGNORED = ("ProgressBar",)


def is_callback(value: object) -> bool:
    """Whether something can be given to a loop as a callback."""
    return isinstance(value, (FederatedCallback, *lightning_classes("Callback")))


def merged(given: Sequence[Any], configured: Sequence[Any]) -> list[Any]:
    """Callbacks given to the loop, with those of the module; these replace others of the same class, as in Trainer."""
    plain = lightning_classes("Callback")
    replaced = {
        type(other)
        for other in given
        if type(other) not in plain and any(isinstance(one, type(other)) for one in configured)
    }
    return [*(one for one in given if type(one) not in replaced), *configured]


def adapted(callbacks: Iterable[Any]) -> list[FederatedCallback]:
    """Callbacks as the loop takes them; one clear error for one that it cannot do anything with."""
    found = [one if isinstance(one, FederatedCallback) else _adapt(one) for one in callbacks]
    return [one for one in found if one is not None]


def to_call(callbacks: Iterable[FederatedCallback]) -> tuple[list[Any], list[Any]]:
    """Of a loop's callbacks, those of Lightning's whose hooks are called, and all of Lightning's."""
    every = [one for one in callbacks if hasattr(one, "callback") and is_callback(one.callback)]
    called = [one.callback for one in every if isinstance(one, LightningCallback)]
    return called, [one.callback for one in every]


def _adapt(callback: Any) -> FederatedCallback | None:
    name = type(callback).__name__
    for base, (reason, remedy) in REFUSED.items():
        if isinstance(callback, lightning_classes(f"callbacks.{base}")):
            raise ConfigurationError(f"The callback `{name}` {reason}.", remedy(callback))
    for base in IGNORED:
        if isinstance(callback, lightning_classes(f"callbacks.{base}")):
            rank_zero_info(f"The callback `{name}` is not used: the loop has a progress bar of its own.")
            return None
    for base, kind in TRANSLATED.items():
        if isinstance(callback, classes := lightning_classes(f"callbacks.{base}")):
            _check_unchanged(callback, base, classes)
            return kind(callback)
    return LightningCallback(callback)


def _check_unchanged(callback: Any, base: str, classes: tuple[type, ...]) -> None:
    """One clear error for a subclass whose methods would not be called."""
    for cls in type(callback).__mro__:
        if cls in classes:
            return
        for name, value in vars(cls).items():
            if callable(value) and name != "__init__":
                raise ConfigurationError(
                    f"The callback `{type(callback).__name__}` changes `{name}` of `{base}`, which is not called here.",
                    f"Use `{base}` itself, or write a `FederatedCallback`.",
                )
