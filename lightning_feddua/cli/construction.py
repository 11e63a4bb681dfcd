"""The objects that a recipe describes, and whose fault it is where one cannot be made."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_feddua.errors import ConfigurationError


class ConstructionError(Exception):
    """The constructor of a class has failed; that is a mistake in the class and not in the command line.

    Args:
        cls: the class.
        cause: what its constructor has raised.
        trace: the traceback of that.
    """

    def __init__(self, cls: type, cause: Exception, trace: TracebackType) -> None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        message = f"{type(cause).__name__}: {' '.join(str(cause).split()).rstrip('.')}"
        super().__init__(f"The constructor of `{name}` failed with {message}. The traceback above shows where.")
        # The constructor's own, without the way to it.
        self.traceback = "".join(traceback.format_exception(type(cause), cause, trace))


def make(parser: ArgumentParser, config: Namespace) -> Namespace:
    """Make the objects that a parsed command line describes.

    Raises:
        ConstructionError: a constructor has failed.
    """
    failures: list[tuple[type, Exception, TracebackType | None]] = []

    def call(cls: type, *args: Any, applied_instantiation_links: Any = None, **kwargs: Any) -> Any:
        try:
            return cls(*args, **kwargs)
        except Exception as error:
            # The first entry is the call in this function.
            failures.append((cls, error, error.__traceback__ and error.__traceback__.tb_next))
            raise

    # jsonargparse tries one type of a union after another, and says no more of an error than its message.
    parser.add_instantiator(call, class_type=object)
    try:
        return parser.instantiate(config)
    except Exception as error:
        if not failures:
            raise
        cls, cause, trace = failures[0]
        if isinstance(cause, ConfigurationError):
            raise cause from error
        if trace is None:
            problem = " ".join(str(cause).split()).rstrip(".")
            raise ConfigurationError(
                f"A `{cls.__name__}` cannot be made: {problem}.", "Change its arguments."
            ) from error
        raise ConstructionError(cls, cause, trace) from None
