"""Lightning under both of its import names: ``lightning.pytorch`` and ``pytorch_lightning``, two packages to Python.

Classes of one are not those of the other, and most published modules import the second. Whoever asks whether something
is a LightningModule, or overrides a hook, asks here.
"""

from __future__ import annotations

import sys
from abc import ABC
from typing import TYPE_CHECKING, Any, TypeGuard

from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden as _overrides

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_classes(name: str) -> tuple[type, ...]:
    """A class of Lightning in each package that is imported; nothing can be an instance of it in one that is not.

    Args:
        name: as both packages export it, such as ``"LightningModule"`` or ``"callbacks.EarlyStopping"``.
    """
    path, _, name = name.rpartition(".")
    modules = [sys.modules.get(f"{package}.{path}".rstrip(".")) for package in _PACKAGES]
    return tuple(getattr(module, name) for module in modules if module is not None and hasattr(module, name))


def is_module(value: object) -> TypeGuard[LightningModule]:
    """Whether something is a LightningModule."""
    return isinstance(value, lightning_classes("LightningModule"))


def is_datamodule(value: object) -> TypeGuard[LightningDataModule]:
    """Whether something is a LightningDataModule."""
    return isinstance(value, lightning_classes("LightningDataModule"))


if TYPE_CHECKING:
    AnyDataModule = LightningDataModule
else:

    class AnyDataModule(ABC):  # noqa: B024
        """A LightningDataModule of either package, as a type for the command line, which asks what derives from it."""

        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            return issubclass(other, lightning_classes("LightningDataModule"))


def is_overridden(name: str, owner: Any) -> bool:
    """Whether a LightningModule, a data module or a callback of Lightning's defines a hook of its own."""
    for kind in ("LightningModule", "LightningDataModule", "Callback"):
        for parent in lightning_classes(kind):
            if isinstance(owner, parent):
                return hasattr(parent, name) and _overrides(name, owner, parent)
    raise TypeError(f"`{type(owner).__name__}` is not a class of Lightning's.")


def package_of(owner: object) -> str:
    """The package that a module's or a data module's base class comes from."""
    for package in _PACKAGES[1:]:
        if any(base.__module__.partition(".")[0] == package for base in type(owner).__mro__):
            return package
    return _PACKAGES[0]
