"""Which objects a snapshot looks into."""

from __future__ import annotations

from enum import Enum
from types import ModuleType
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_feddua.host.hidden.same_values import PLAIN
from lightning_feddua.lightning_names import is_datamodule, lightning_classes

# Types whose instances cannot change, and others that are nobody's state.
ATOMS = PLAIN | {ModuleType, torch.dtype, torch.device, torch.Size, range, slice}
_OPAQUE = (type, ModuleType, Enum, BaseException, np.generic, DataLoader, Dataset)
# Objects of these packages look after themselves; modules, tensors and generators of theirs are remembered.
OTHERS = frozenset(
    ["lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "lightning_feddua"]
    + ["torch", "torchmetrics", "tensorboard", "wandb", "logging", "threading", "multiprocessing", "concurrent"]
    + ["builtins", "itertools", "functools", "contextlib", "weakref", "typing", "abc"]
    + ["asyncio", "importlib", "inspect", "io", "pathlib", "re", "unittest"]
)
# But these hold state that is to be remembered.
_WEAK = (WeakKeyDictionary, WeakValueDictionary)
_OF_TORCH = ("torch.optim", "torch.amp", "torch.cuda.amp", "torch.distributions")


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module's class is torch's own."""
    return type(module).__module__.startswith("torch.")


def _is_of_the_run(value: object) -> bool:
    """Whether something belongs to a whole run, and not to a module, though its class may be a user's."""
    return isinstance(value, lightning_classes("loggers.Logger")) or is_datamodule(value)


def is_followed(value: object) -> bool:
    """Whether an object's attributes are remembered."""
    if type(value).__module__.startswith(_OF_TORCH) or isinstance(value, _WEAK):
        return True
    return not (isinstance(value, _OPAQUE) or package_of_class(type(value)) in OTHERS or _is_of_the_run(value))


def package_of_class(cls: type) -> str:
    """The package that a class comes from."""
    return cls.__module__.partition(".")[0]


def slots_of(cls: type) -> list[str]:
    """The attributes that a class keeps in slots."""
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]
