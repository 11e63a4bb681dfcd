"""Global variables that a user's own functions read or assign."""

from __future__ import annotations

import dis
import random
import site
import sys
import sysconfig
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_feddua.host.hidden.parts import Attributes

_FOLLOWED = (Tensor, np.ndarray, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_ASSIGNING = ("STORE_GLOBAL", "DELETE_GLOBAL")
_READING = ("LOAD_GLOBAL", "LOAD_NAME")


class Globals(Attributes):
    """Global variables that a function assigns.

    Args:
        label: what a user knows them by.
        variables: all global variables of the function's module.
        names: those.
    """

    def __init__(self, label: str, variables: dict[str, Any], names: tuple[str, ...]) -> None:
        self._variables, self._names = variables, names
        super().__init__(label, self.value)

    @property
    def value(self) -> Any:
        """As they are now."""
        return {name: self._variables[name] for name in self._names if name in self._variables}

    @value.setter
    def value(self, value: Any) -> None:
        pass

    def _set(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def _delete(self, name: str) -> None:
        del self._variables[name]


def globals_of(function: FunctionType) -> tuple[Globals | None, Iterator[tuple[str, Any]]]:
    """What a function of a user's own code assigns among global variables, and all that it names, by label."""
    if not _is_own_file(function.__code__.co_filename):
        return None, iter(())
    read, assigned = _names(function.__code__)
    known, home = function.__globals__, function.__module__
    values = ((f"{home}.{name}", known[name]) for name in dict.fromkeys([*read, *assigned]) if name in known)
    part = Globals(home, known, assigned) if assigned else None
    return part, ((label, value) for label, value in values if _may_keep_something(value, home))


def _may_keep_something(value: Any, home: str) -> bool:
    """Whether it is followed: functions, numbers in arrays, generators, and classes of the same file.

    Lists, dictionaries and objects are left alone: what users write into them while they train, they want to read.
    Modules are seen by themselves.
    """
    if isinstance(value, type):
        return value.__module__ == home and not issubclass(value, nn.Module | BaseException | Enum)
    return isinstance(value, (FunctionType, *_FOLLOWED))


@lru_cache(maxsize=4096)
def _is_own_file(name: str) -> bool:
    if name.startswith("<"):
        # Typed in, as in a notebook, or made by a library such as dataclasses.
        return name.startswith(("<stdin", "<ipython"))
    path = Path(name)
    return not any(path.is_relative_to(folder) for folder in _installed())


@lru_cache(maxsize=1)
def _installed() -> tuple[Path, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages = [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[2])]
    return tuple({Path(path) for path in [*paths, *packages] if path and path not in sys.path[:1]})


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    read: dict[str, None] = {}
    assigned: dict[str, None] = {}
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname in _READING:
                read[instruction.argval] = None
            elif instruction.opname in _ASSIGNING:
                assigned[instruction.argval] = None
    return tuple(read), tuple(assigned)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
