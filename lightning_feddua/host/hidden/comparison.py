"""Attributes and containers that a snapshot compares before each client, all at once and in C."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any

from lightning_feddua.host.hidden.parts import Attributes, ClassAttributes, Part, Registry

# Numbers that can be equal although they are of different types.
_NUMBERS = frozenset({bool, int, float, complex})


class Compared:
    """Parts that are compared with what they held."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._live: list[Any] = []
        self._saved: list[Any] = []
        # Of those, where order and types of values count besides.
        self._close: list[Part] = []
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        self._kinds: list[Any] = []

    def add(self, part: Part) -> None:
        """Compare a part from now on."""
        self._parts.append(part)
        self._live.append(part.value)
        self._saved.append(part.saved)
        if isinstance(part, Registry | ClassAttributes) or (isinstance(part, Attributes) and part.torchs_own):
            return
        if isinstance(part.saved, dict):
            if len(part.saved) > 1 or not _NUMBERS.isdisjoint(map(type, part.saved.values())):
                self._dicts.append(part.value)
                self._close.append(part)
        elif isinstance(part.saved, list | deque) and not _NUMBERS.isdisjoint(map(type, part.saved)):
            self._lists.append(part.value)
            self._close.append(part)

    def note(self) -> None:
        """Note order and types, once all parts are here and after each change of what they should hold."""
        self._kinds = self._present_kinds()

    def same(self) -> bool:
        """Whether all of them hold what they held."""
        try:
            # By identity first.
            if self._live != self._saved:
                return False
            return self._present_kinds() == self._kinds or all(part.same() for part in self._close)
        except Exception:
            # There is a tensor instead of another, for example.
            return False

    def changed(self) -> list[Part]:
        """Those that hold something else."""
        found = []
        for part, live, saved in zip(self._parts, self._live, self._saved, strict=True):
            try:
                same = live == saved
            except Exception:
                same = False
            if not same:
                found.append(part)
        return [*found, *(part for part in self._close if not part.same())]

    def _present_kinds(self) -> list[Any]:
        """The order of dictionaries, and the types of values in all containers."""
        values = chain(chain.from_iterable(map(dict.values, self._dicts)), chain.from_iterable(self._lists))
        return [*chain.from_iterable(self._dicts), *map(type, values)]
