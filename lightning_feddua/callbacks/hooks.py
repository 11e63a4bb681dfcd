"""Calls of callbacks' hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lightning_feddua.callbacks.base import FederatedCallback


class Hooks:
    """Calls a hook of all callbacks with the arguments that each takes, as Fabric's ``call`` does.

    Fabric inspects signatures on each call, which takes longer than the server step of a small model; here it is done
    once, and hooks that nobody overrides are left out.

    Args:
        callbacks: in the order in which they are called.
    """

    def __init__(self, callbacks: Sequence[FederatedCallback]) -> None:
        self._callbacks = callbacks
        # For each hook the methods that override it, with the names that they take; None for all.
        self._methods: dict[str, list[tuple[Callable[..., Any], set[str] | None]]] = {}

    def are_used(self, hook: str) -> bool:
        """Whether any callback overrides a hook."""
        return bool(self._find(hook))

    def call(self, hook: str, **arguments: Any) -> None:
        """Call a hook."""
        for method, names in self._find(hook):
            method(**{name: value for name, value in arguments.items() if names is None or name in names})

    def _find(self, hook: str) -> list[tuple[Callable[..., Any], set[str] | None]]:
        if hook not in self._methods:
            base = getattr(FederatedCallback, hook)
            own = [callback for callback in self._callbacks if getattr(type(callback), hook, None) is not base]
            self._methods[hook] = [(method, _names(method)) for method in (getattr(c, hook) for c in own)]
        return self._methods[hook]


def _names(method: Callable[..., Any]) -> set[str] | None:
    parameters = inspect.signature(method).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return None if takes_all else set(parameters)
