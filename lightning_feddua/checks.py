"""Checks of what users pass: one clear error of two sentences before any work starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from lightning_feddua.errors import ConfigurationError, choices


def check_whole(name: str, value: Any, least: int) -> None:
    """A whole number from ``least`` up; a NumPy integer is one, True and 5.0 are not.

    >>> check_whole("max_rounds", 3, least=0)
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigurationError(f"`{name}={value!r}` is not a whole number.", f"Give one from {least} up.")
    if value < least:
        raise ConfigurationError(f"`{name}={value}` is less than {least}.", f"Give a whole number from {least} up.")


def check_number(name: str, value: Any) -> None:
    """A number that is neither NaN nor a truth value."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ConfigurationError(f"`{name}={value!r}` is not a number.", "Give a number.")


def check_positive(name: str, value: Any, finite: bool = False) -> None:
    """A number above 0, which may be infinite unless ``finite``."""
    check_number(name, value)
    if not value > 0:
        raise ConfigurationError(f"`{name}={value}` is not positive.", "Give a positive number.")
    if finite and math.isinf(value):
        raise ConfigurationError(f"`{name}={value}` is not finite.", "Give a finite number.")


def check_non_negative(name: str, value: Any, example: str = "0 or a small number") -> None:
    """A finite number from 0 up."""
    check_number(name, value)
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"`{name}={value}` is not a number from 0 up.", f"Choose {example}.")


def check_decay(name: str, value: Any) -> None:
    """A number in [0, 1), as the memory of a moving average."""
    check_number(name, value)
    if not 0 <= value < 1:
        raise ConfigurationError(f"`{name}={value}` lies outside [0, 1).", "Choose a value inside, such as 0.9.")


def check_flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"`{name}={value!r}` is neither True nor False.", "Give one of the two.")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """One of a few words."""
    if value not in tuple(allowed):
        raise ConfigurationError(f"There is no {name} `{value}`.", f"Choose one of {choices(allowed)}.")


def check_instance(name: str, value: Any, kind: type) -> None:
    """An instance of a class."""
    if not isinstance(value, kind):
        raise ConfigurationError(f"The {name} is `{value!r:.100}`.", f"Give an instance of `{kind.__name__}`.")


def check_cohort_size(name: str, value: Any) -> None:
    """A number of clients, or a fraction of them if a float."""
    check_number(name, value)
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ConfigurationError(
                f"`{name}={value}` is not a fraction of the clients.",
                "Give a float in (0, 1], a whole number of clients, or None for all.",
            )
    elif value < 1:
        raise ConfigurationError(f"`{name}={value}` is less than 1.", "Choose at least one client.")


def check_batches(name: str, value: Any, least: int) -> None:
    """A number of batches from ``least`` up, or a fraction of them; as in Trainer, 1 is one batch, and 1.0 is all.

    >>> check_batches("limit_val_batches", 0.25, least=0)
    """
    check_number(name, value)
    fraction = isinstance(value, float) and 0 < value <= 1
    if not fraction and (value < least or value % 1 != 0):
        raise ConfigurationError(
            f"`{name}={value}` is neither a number of batches nor a fraction of them.",
            f"Give a whole number from {least} up, a float up to 1.0, or None for all.",
        )


def check_flag_or_count(name: str, value: Any) -> None:
    """True, False, or a number from 0 up."""
    if not isinstance(value, bool):
        check_whole(name, value, least=0)
