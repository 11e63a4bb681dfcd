"""Which callbacks change a round's update: a run is resumed only with those that it had."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_feddua._private import version_of
from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.errors import ConfigurationError

_PLAIN = (bool, int, float, str, type(None))


class UpdateChanges:
    """Remembers which callbacks see the updates before the server does, and which of them change any."""

    def __init__(self) -> None:
        self._seeing: list[str] = []
        self._changing: list[str] = []
        # Those of the run that is resumed.
        self._before: list[str] | None = None

    @contextmanager
    def watched(self, update: RoundUpdate, callbacks: Sequence[Any]) -> Iterator[None]:
        """Around the callbacks that see an update before the server does.

        Raises:
            ConfigurationError: one of them has changed it that the run did not have before it was resumed.
        """
        before = _versions(update) if callbacks else []
        yield
        self._seeing = [_described(callback) for callback in callbacks]
        if not callbacks or _versions(update) == before:
            return
        new = [name for name in self._seeing if self._before is not None and name not in self._before]
        if new:
            raise ConfigurationError(
                f"`{new[0]}` changes the updates of a run that did without it before it was resumed.",
                "Resume with the callbacks that the run had, or start afresh.",
            )
        self._changing = self._seeing

    def state_dict(self) -> dict[str, list[str]]:
        """Both lists, as plain values."""
        return {"seeing": self._seeing, "changing": self._changing}

    def load_state_dict(self, state: dict[str, list[str]], callbacks: Sequence[Any]) -> None:
        """Resume a run.

        Args:
            state: what it has saved.
            callbacks: those of this run that see updates before the server does.

        Raises:
            ConfigurationError: one that changed updates is missing, or has other arguments.
        """
        self._seeing, self._changing = list(state["seeing"]), list(state["changing"])
        self._before = self._seeing
        present = [_described(callback) for callback in callbacks]
        missing = [name for name in self._changing if name not in present]
        if missing:
            raise ConfigurationError(
                f"The run's updates were changed by `{missing[0]}`, which is not among the callbacks.",
                "Resume with the callbacks that the run had, or start afresh.",
            )


def _versions(update: RoundUpdate) -> list[tuple[int, int]]:
    """What changes when a tensor of an update is changed or replaced."""
    weights = [] if update.client_weights is None else [update.client_weights]
    tensors = [update.mean_delta, update.squared_norms, *weights, *update.extra_vectors.values()]
    return [(id(tensor), version_of(tensor)) for tensor in [*tensors, *update.scalars.values()]]


def _described(callback: Any) -> str:
    """A callback by its class and those of its arguments that it keeps under the same name."""
    names = [name for name in inspect.signature(type(callback).__init__).parameters if name in vars(callback)]
    kept = [f"{name}={vars(callback)[name]!r}" for name in names if isinstance(vars(callback)[name], _PLAIN)]
    return f"{type(callback).__qualname__}({', '.join(kept)})"
