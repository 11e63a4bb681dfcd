"""Where in a user's own code something failed: a traceback without the frames between."""

from __future__ import annotations

import traceback
from importlib.util import find_spec
from pathlib import Path

# Those through which a user's code is called, and which say nothing about a mistake in it.
_PACKAGES = ("lightning_feddua", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "jsonargparse")


def own_traceback(error: BaseException) -> str | None:
    """The traceback of what began it, from the user's code on; None where nothing of the user's took part.

    Args:
        error: the exception, which may have others as causes.
    """
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    skipped = tuple(f"{folder}/" for folder in map(_folder, _PACKAGES) if folder is not None)
    frames = traceback.extract_tb(cause.__traceback__)
    own = [one for one in frames if not one.filename.startswith((*skipped, "<frozen"))]
    if not own or cause.__traceback__ is None:
        return None
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(own)]
    return "".join([*lines, *traceback.format_exception_only(cause)])


def _folder(package: str) -> Path | None:
    """Where a package is; it is not imported."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
