"""What a module is made of besides its tensors: the classes of its parts, and their numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

# Larger numbers are times since 1970.
_LARGEST = 1e9


def module_parts(module: nn.Module) -> dict[str, Any]:
    """The class of each part of a module, and its public numbers and functions, by their names.

    Args:
        module: whose own class does not count: a run may be resumed with a subclass.
    """
    parts: dict[str, Any] = {}
    for name, part in module.named_modules():
        if name:
            parts[name] = type(part).__qualname__
        for attribute, value in vars(part).items():
            if not attribute.startswith("_") and attribute != "training":
                described = _described(part, value)
                if described is not None:
                    parts[f"{name}.{attribute}".lstrip(".")] = described
    return parts


def _described(part: nn.Module, value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value if abs(value) < _LARGEST or value != value or abs(value) == float("inf") else None
    # In modules of the user's, text often says where something is.
    if isinstance(value, str):
        return value if type(part).__module__.startswith("torch.") else None
    if isinstance(value, tuple) and all(isinstance(item, bool | int | float) for item in value):
        return list(value)
    return getattr(value, "__qualname__", None)
