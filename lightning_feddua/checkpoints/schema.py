"""Whether the content of a checkpoint has the names, shapes and types that a run can take over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# The entries of a run's state that every checkpoint has, with their types.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "identity": dict,
    "engine": (str, type(None)),
    "buffers": dict,
    "parts": dict,
    "loggers": list,
    "history": list,
}
# Those that came later.
_LATER: dict[str, type] = {"moving": list, "metrics": dict, "columns": dict, "round": int, "eta_g": float}
_LATER |= {"certificates": str, "moved": list}
_PLAIN = (bool, int, float, str)


def check_types(state: Mapping[str, Any]) -> None:
    """Whether a saved state has its entries, each of its type.

    Raises:
        ValueError: with what is wrong, as a part of a sentence.
    """
    later = {name: kind for name, kind in _LATER.items() if state["format"] > 1 or name in state}
    for name, kind in (_TYPES | later).items():
        if name not in state:
            raise ValueError(f"it has no `{name}`")
        value = state[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"its `{name}` is a `{type(value).__name__}`")
    rounds = len(state["history"])
    if state["format"] > 1 and state["round"] != max(0, rounds - 1) and state["round"] != rounds:
        raise ValueError(f"its `round` is {state['round']} after {rounds}")
    for name, part in state["parts"].items():
        if not isinstance(name, str) or not isinstance(part, dict | type(None)):
            raise ValueError(f"its state of `{name!r:.50}` is a `{type(part).__name__}`")
    for logger in state["loggers"]:
        version = logger["version"]
        if not isinstance(logger["class"], str) or not isinstance(version, int | str | None):
            raise ValueError(f"its logger has the version `{version!r:.50}`")
    columns = state.get("columns", {})
    renamed = columns.get("renamed", {})
    for names in (state.get("moving", []), state.get("moved", []), *columns.values(), renamed.keys(), renamed.values()):
        if not all(isinstance(name, str) for name in names):
            raise ValueError("it has something else than a name where one belongs")


def engine_of(saved: Mapping[str, Any]) -> str:
    """The name of the engine that a saved run used.

    Args:
        saved: its state.
    """
    # Earlier versions said in the settings whether the vectorized engine compiled.
    compiled = saved["engine"] == "vectorized" and saved["identity"]["settings"].get("compile") is True
    return "compiled" if compiled else str(saved["engine"])


def check_tensors(saved: Any, own: Mapping[str, Tensor], what: str, strict: bool = True) -> None:
    """Whether tensors have the names, shapes and dtypes of those that they are copied into.

    Args:
        saved: tensors by name.
        own: the run's.
        what: what they are, for the error.
        strict: whether all names must be there, and no other.

    Raises:
        ValueError: with what is wrong, as a part of a sentence.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"its {what} are a `{type(saved).__name__}`")
    if strict and (different := {*map(str, saved)} ^ {*own}):
        raise ValueError(f"its {what} differ in `{min(different):.100}`")
    for name, tensor in own.items():
        if name in saved and isinstance(tensor, Tensor):
            _check_tensor(saved[name], tensor, f"`{name}` among its {what}")


def check_vectors(saved: Any, weights: Tensor, what: str) -> None:
    """Whether all tensors in a tree are vectors as the weights are one."""
    if isinstance(saved, Tensor):
        _check_tensor(saved, weights, f"a tensor in its {what}")
    elif isinstance(saved, dict):
        for value in saved.values():
            check_vectors(value, weights, what)
    elif isinstance(saved, list | tuple):
        for value in saved:
            check_vectors(value, weights, what)


def check_like(saved: Any, own: Any, what: str) -> None:
    """Whether a saved state has the types of one that is there, as far as that has any.

    None stands for what is not known yet, in both.
    """
    if isinstance(own, dict):
        if not isinstance(saved, dict):
            raise ValueError(f"its {what} is a `{type(saved).__name__}`")
        for name, value in own.items():
            if name in saved:
                check_like(saved[name], value, f"{what}.{name}")
    elif isinstance(own, Tensor):
        _check_tensor(saved, own, f"its {what}")
    elif isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple):
            raise ValueError(f"its {what} is a `{type(saved).__name__}`")
    elif own is None or saved is None:
        if saved is not None and type(saved) not in _PLAIN:
            raise ValueError(f"its {what} is a `{type(saved).__name__}`")
    # A number may be a whole one by chance.
    elif type(own) in _PLAIN and type(saved) is not type(own) and not {type(own), type(saved)} <= {int, float}:
        raise ValueError(f"its {what} is a `{type(saved).__name__}`")


def _check_tensor(saved: Any, own: Tensor, what: str) -> None:
    if not isinstance(saved, Tensor):
        raise ValueError(f"{what} is a `{type(saved).__name__}`")
    if saved.shape != own.shape or saved.dtype != own.dtype:
        found, expected = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (saved, own))
        raise ValueError(f"{what} is {found} and not {expected}")
