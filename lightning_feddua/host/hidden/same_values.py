"""Whether two Python values are the same, whatever they are made of."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Values that cannot change.
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


def same_value(first: Any, second: Any) -> bool:
    """Whether two values are the same object, or equal in type and in everything they hold; False where in doubt."""
    if first is second:
        return True
    kind = type(first)
    if kind is not type(second):
        return False
    if kind in PLAIN:
        return bool(first == second or (first != first and second != second))
    try:
        return _same(first, second)
    except Exception:
        # What cannot be compared, such as tensors of a trace, has changed.
        return False


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and first.device == second.device and _same_elements(first, second)
    if isinstance(first, np.ndarray):
        if first.dtype != second.dtype:
            return False
        # NaN is the same as NaN, which takes far longer to find out.
        return np.array_equal(first, second) or (
            first.dtype.kind in "fc" and np.array_equal(first, second, equal_nan=True)
        )
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, set | frozenset):
        return bool(first == second)
    if (state := generator_state(first)) is not None:
        return same_value(state, generator_state(second))
    return False


def _same_elements(first: Tensor, second: Tensor) -> bool:
    if torch.equal(first, second):
        return True
    # NaN is the same as NaN.
    if first.shape != second.shape or not torch.equal(first.isnan(), second.isnan()):
        return False
    return torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))


def generator_state(value: object) -> Any:
    """The state of a random number generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else None


def set_generator_state(value: Any, state: Any) -> None:
    """Bring a random number generator back to a state."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value.setstate(state)
