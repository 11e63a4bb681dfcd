"""The kinds of things that a snapshot remembers: attributes, items of containers, variables of functions."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import zip_longest
from operator import is_
from types import CellType, FunctionType
from typing import Any

from torch import nn

from lightning_feddua._private import BUFFERS
from lightning_feddua.host.hidden.same_values import PLAIN, same_value

_MISSING = object()


class Part:
    """One thing that is remembered.

    Args:
        label: what a user knows it by, such as ``self.counter``.
        value: the object itself.
    """

    saved: Any

    def __init__(self, label: str, value: Any) -> None:
        self.label = label
        self.value = value

    def same(self) -> bool:
        """Whether it has the same value as before."""
        return same_value(self.saved, self.value)

    def changes(self) -> Iterator[str]:
        """The labels of what has changed."""
        if not self.same():
            yield self.label

    @property
    def identity(self) -> int:
        """The id of what it is about, for as long as that lives."""
        return id(self.value)

    def restore(self) -> None:
        """Undo all changes, in place."""
        raise NotImplementedError

    def renew(self) -> bool:
        """Take the present value for the one to come back to; False if that takes a new snapshot."""
        return False


class Items(Part):
    """A list, a set, a deque or a dictionary. What it holds is kept as it is, not copied."""

    def __init__(self, label: str, value: Any) -> None:
        super().__init__(label, value)
        kind = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(value, kind))
        self.saved = kind(value)

    def same(self) -> bool:
        """Items are compared one by one: a subclass may hold more, or compare otherwise."""
        if (
            isinstance(self.saved, list)
            and len(self.value) == len(self.saved)
            and all(map(is_, self.value, self.saved))
        ):
            return True
        now = type(self.saved)(self.value)
        if isinstance(now, dict) and not same_value(list(now), list(self.saved)):
            return False
        return same_value(self.saved, now)

    def restore(self) -> None:
        """The same objects again, in the same order."""
        if isinstance(self.value, list):
            self.value[:] = self.saved
        elif isinstance(self.value, deque):
            self.value.clear()
            self.value.extend(self.saved)
        else:
            self.value.clear()
            self.value.update(self.saved)

    def renew(self) -> bool:
        """Where only values that hold nothing have come and gone."""
        known, now = self.saved, type(self.saved)(self.value)
        if isinstance(now, set):
            others = [*(known ^ now)]
        elif isinstance(now, dict):
            others = _others(known, now)
        else:
            others = [item for pair in zip_longest(known, now) if pair[0] is not pair[1] for item in pair]
        return _replace(known, now) if PLAIN.issuperset(map(type, others)) else False


class Registry(Items):
    """What a module keeps its parameters, its buffers or its submodules in.

    Args:
        label: what a user knows the module by.
        value: the dictionary.
        kind: its name in the module.
        module: the module.
    """

    def __init__(self, label: str, value: dict[str, Any], kind: str, module: nn.Module) -> None:
        super().__init__(label, value)
        self.kind = kind
        self.module = module

    def others(self) -> list[str]:
        """The names of what is new, gone or another object now; one buffer may take the place of another."""
        names = [name for name in {**self.saved, **self.value} if self.saved.get(name) is not self.value.get(name)]
        if self.kind != BUFFERS:
            return names
        return [name for name in names if self.saved.get(name) is None or self.value.get(name) is None]

    def same(self) -> bool:
        """The same parameters and modules, and buffers of the same names."""
        return not self.others()

    def renew(self) -> bool:
        """Other tensors and modules take a new snapshot."""
        return False

    def changes(self) -> Iterator[str]:
        """What is new, gone or another object now."""
        return (f"{self.label}.{name}" for name in self.others())


class Attributes(Part):
    """The attributes of an object, in its ``__dict__``.

    Args:
        label: what a user knows the object by.
        value: the ``__dict__``.
        torchs_own: whether it is one of torch's layers, whose private attributes (an LSTM's references to its weights)
            nobody needs to know of.
    """

    def __init__(self, label: str, value: MutableMapping[str, Any], torchs_own: bool = False) -> None:
        super().__init__(label, value)
        self.saved = dict(value)
        self.torchs_own = torchs_own

    def same(self) -> bool:
        """By value, and not by the order in which they were set."""
        return next(self.changes(), None) is None

    def changes(self) -> Iterator[str]:
        """The attributes that have changed."""
        for name in {**self.saved, **self.value}:
            if self.torchs_own and name.startswith("_"):
                continue
            if not same_value(self.saved.get(name, _MISSING), self.value.get(name, _MISSING)):
                yield f"{self.label}.{name}"

    def restore(self) -> None:
        """The same objects again."""
        for name in self._others():
            if name in self.saved:
                self._set(name, self.saved[name])
            else:
                self._delete(name)

    def renew(self) -> bool:
        """Where only values that hold nothing have come and gone."""
        now = dict(self.value)
        return _replace(self.saved, now) if PLAIN.issuperset(map(type, _others(self.saved, now))) else False

    def _others(self) -> list[str]:
        """Attributes that are another object now, or are new or gone."""
        known, now = self.saved, self.value
        return [name for name in {**known, **now} if known.get(name, _MISSING) is not now.get(name, _MISSING)]

    def _set(self, name: str, value: Any) -> None:
        self.value[name] = value

    def _delete(self, name: str) -> None:
        del self.value[name]


class ClassAttributes(Attributes):
    """The attributes of a class; methods among them."""

    def __init__(self, label: str, owner: type) -> None:
        # Read-only, and always up to date.
        super().__init__(label, vars(owner))  # type: ignore[arg-type]
        self._owner = owner

    def _others(self) -> list[str]:
        # Python itself adds some that begin like this.
        return [name for name in super()._others() if not name.startswith("__")]

    def changes(self) -> Iterator[str]:
        """The attributes that have changed."""
        return (label for label in super().changes() if not label.rpartition(".")[2].startswith("__"))

    def _set(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def _delete(self, name: str) -> None:
        delattr(self._owner, name)


class Slots(Attributes):
    """The attributes of an object without a ``__dict__``."""

    def __init__(self, label: str, owner: Any, names: list[str]) -> None:
        self._owner, self._names = owner, names
        super().__init__(label, self.value)

    @property
    def value(self) -> Any:
        """As they are now."""
        return {name: getattr(self._owner, name) for name in self._names if hasattr(self._owner, name)}

    @value.setter
    def value(self, value: Any) -> None:
        pass

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def _delete(self, name: str) -> None:
        object.__delattr__(self._owner, name)


class Elements(Part):
    """A ``bytearray``, or an array of Python's own."""

    def __init__(self, label: str, value: Any) -> None:
        super().__init__(label, value)
        self.saved = value[:]

    def same(self) -> bool:
        """All of its elements."""
        return bool(self.value == self.saved)

    def restore(self) -> None:
        """The same elements in the same object."""
        self.value[:] = self.saved

    def renew(self) -> bool:
        """Copy them again."""
        self.saved = self.value[:]
        return True


class Cells(Part):
    """The variables that a function has of the function around it."""

    def __init__(self, label: str, value: FunctionType) -> None:
        super().__init__(label, value)
        self._cells = value.__closure__ or ()
        self.saved = self.contents()

    def contents(self) -> list[Any]:
        """What the variables are now."""
        return [_content(cell) for cell in self._cells]

    def same(self) -> bool:
        """Whether all variables have the same value."""
        return same_value(self.saved, self.contents())

    def restore(self) -> None:
        """The same objects again."""
        for cell, content in zip(self._cells, self.saved, strict=True):
            if content is _MISSING:
                del cell.cell_contents
            elif _content(cell) is not content:
                cell.cell_contents = content


def _others(known: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The values that are in one dictionary and not in the other, or not under the same name."""
    pairs = [(known.get(name), now.get(name)) for name in {**known, **now}]
    return [value for pair in pairs if pair[0] is not pair[1] for value in pair]


def _replace(saved: Any, items: Any) -> bool:
    """Give a container other items."""
    saved.clear()
    (saved.update if isinstance(saved, dict | set) else saved.extend)(items)
    return True


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The variable has no value yet.
        return _MISSING
