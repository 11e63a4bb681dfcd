"""Calls of callbacks' hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.engines.base import Client, ClientEvents

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class Hooks:
    """Calls a hook of all callbacks with the arguments that each takes, as Fabric's ``call`` does.

    Fabric inspects signatures on each call, which takes longer than the server step of a small model; here it is done
    once, and hooks that nobody overrides are left out.

    Args:
        callbacks: in the order in which they are called.
    """

    def __init__(self, callbacks: Sequence[FederatedCallback]) -> None:
        self._callbacks = callbacks
        # For each hook, of all callbacks or some, the methods that override it and the names they take; None for all.
        self._methods: dict[tuple[str, bool, bool, bool], list[tuple[Callable[..., Any], set[str] | None]]] = {}

    def are_used(self, hook: str) -> bool:
        """Whether any callback overrides a hook."""
        return bool(self._find(hook))

    def owners(self, hook: str, until: FederatedCallback) -> list[Any]:
        """The callbacks before another one that override a hook."""
        return [getattr(method, "__self__", None) for method, _ in self._find(hook, until)]

    def client_events(self, loop: FederatedLoop, round: int) -> ClientEvents:
        """Tells callbacks of each client, where any wants to know."""

        def teller(hook: str) -> Callable[[Client], None] | None:
            if not self.are_used(hook):
                return None
            return lambda client: self.call(hook, loop=loop, round=round, client_id=client.name)

        return ClientEvents(teller("on_client_start"), teller("on_client_end"))

    def call(
        self,
        hook: str,
        until: FederatedCallback | None = None,
        after: FederatedCallback | None = None,
        only: FederatedCallback | None = None,
        **arguments: Any,
    ) -> None:
        """Call a hook.

        Args:
            hook: its name.
            until: only of callbacks before this one; or
            after: only of callbacks behind this one; or
            only: of this one alone.
            **arguments: what callbacks may take.
        """
        for method, names in self._find(hook, until, after, only):
            method(**{name: value for name, value in arguments.items() if names is None or name in names})

    def _find(
        self,
        hook: str,
        until: FederatedCallback | None = None,
        after: FederatedCallback | None = None,
        only: FederatedCallback | None = None,
    ) -> list[tuple[Callable[..., Any], set[str] | None]]:
        key = hook, until is not None, after is not None, only is not None
        if key not in self._methods:
            start = 0 if after is None else self._callbacks.index(after) + 1
            end = len(self._callbacks) if until is None else self._callbacks.index(until)
            base = getattr(FederatedCallback, hook)
            chosen = self._callbacks[start:end] if only is None else [only]
            own = [one for one in chosen if getattr(type(one), hook, None) is not base]
            self._methods[key] = [(method, _names(method)) for method in (getattr(c, hook) for c in own)]
        return self._methods[key]


def _names(method: Callable[..., Any]) -> set[str] | None:
    parameters = inspect.signature(method).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return None if takes_all else set(parameters)
