"""Iterators and generator functions that a module keeps: they can be advanced, but not taken back."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from lightning_feddua._private import batches_read
from lightning_feddua.host.hidden.parts import Part
from lightning_feddua.host.hidden.same_values import same_value


class Progress(Part):
    """How far an iterator is."""

    def __init__(self, label: str, value: Iterator[Any]) -> None:
        super().__init__(label, value)
        self.saved = position(value)

    @property
    def is_known(self) -> bool:
        """Whether it can be told how far it is."""
        return self.saved is not None

    def same(self) -> bool:
        """Whether it has not been advanced, as far as can be told."""
        return same_value(self.saved, position(self.value))

    def restore(self) -> None:
        """Nothing can be done."""

    def renew(self) -> bool:
        """As far as it is now."""
        self.saved = position(self.value)
        return True


def is_iterator(value: object) -> bool:
    """Whether something is an iterator of Python's own, a running generator function, or reads a DataLoader."""
    if not isinstance(value, Iterator):
        return False
    return type(value).__module__ in ("builtins", "itertools") or batches_read(value) is not None


def position(iterator: Iterator[Any], above: tuple[int, ...] = ()) -> Any:
    """How far an iterator is, as something to compare; None if that cannot be told.

    Args:
        iterator: the iterator.
        above: the ids of iterators that are built upon it.
    """
    if (count := batches_read(iterator)) is not None:
        return count
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    if (hint := getattr(iterator, "__length_hint__", None)) is not None:
        return hint()
    own: list[Any] = []
    held = gc.get_referents(iterator)
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return "ended"
        own = [frame.f_lasti, dict(frame.f_locals)]
        held += gc.get_referents(frame)
    held += [item for value in held if type(value) is tuple for item in value]
    # What it reads from tells how far it is, even if it does not itself.
    inner = {id(value): value for value in held if isinstance(value, Iterator) and id(value) not in above}
    positions = [position(value, (*above, id(iterator))) for value in inner.values()]
    return None if None in positions or not (own or positions) else [*own, *positions]
