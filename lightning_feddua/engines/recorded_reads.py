"""Which attributes of Python objects a trace has read: their values are constants of what is compiled from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

# The name that a user knows an object by, and that of an attribute.
Attribute = tuple[str, str]


class RecordedReads:
    """Records what is read of a few objects, and tells later whether any of it has changed.

    Args:
        owners: the objects, by the names that a user knows them by.
        opaque: objects that cannot be watched: all numbers and strings in them count as read.
        leave_out: attributes that are not recorded.
    """

    def __init__(
        self, owners: Mapping[str, object], opaque: Mapping[str, object], leave_out: Sequence[str] = ()
    ) -> None:
        self._watched = owners
        self._owners = {**owners, **opaque}
        self._leave_out = frozenset(leave_out)
        self._values: dict[Attribute, Any] = {
            (label, name): value
            for label, owner in opaque.items()
            for name, value in vars(owner).items()
            if isinstance(value, bool | int | float | str)
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is read inside, unless it has been written there before."""
        classes = {label: type(owner) for label, owner in self._watched.items()}
        written: set[Attribute] = set()

        def on_read(attribute: Attribute, value: Any) -> None:
            if attribute not in written and attribute[1] not in self._leave_out:
                self._values.setdefault(attribute, _snapshot(value))

        try:
            for label, owner in self._watched.items():
                # Modules have a `__setattr__` of their own.
                object.__setattr__(owner, "__class__", _recording_class(type(owner), label, on_read, written.add))
            yield
        finally:
            for label, owner in self._watched.items():
                object.__setattr__(owner, "__class__", classes[label])

    def changed(self) -> str | None:
        """The name of an attribute that has been read and has another value now; None if all are as they were."""
        for (label, name), value in self._values.items():
            if _snapshot(vars(self._owners[label]).get(name)) != value:
                return f"{label}.{name}"
        return None


def _recording_class(
    cls: Any, label: str, on_read: Callable[[Attribute, Any], None], on_write: Callable[[Attribute], None]
) -> type:
    """A subclass that tells of every read and write of an object's own attributes."""

    def read(self: Any, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own:
            on_read((label, name), own[name])
        return cls.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        on_write((label, name))
        cls.__setattr__(self, name, value)

    # A name of its own: whoever looks for classes by name, as recipes do, finds one.
    return type(
        f"_Recorded{cls.__name__}",
        (cls,),
        {"__getattribute__": read, "__setattr__": write, "__module__": cls.__module__},
    )


class _Same:
    """Stands for an object that is compared by identity."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _snapshot(value: Any) -> Any:
    """What is compared later to see whether a value has changed, even in place."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_snapshot(item) for item in value]
    if isinstance(value, set):
        return set(value)
    # The same method of the same object is a new object each time that it is looked up.
    frozen = is_dataclass(value) and getattr(value, "__dataclass_params__").frozen  # noqa: B009
    return value if callable(value) or frozen else _Same(value)
