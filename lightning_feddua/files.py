"""Files that are there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole_file(path: Path, mode: str = "w", **arguments: Any) -> Iterator[IO[Any]]:
    """Write a file that is there as a whole or as it was before, even if the machine stops at any instant.

    Args:
        path: the file.
        mode: as in ``open``.
        **arguments: as in ``open``.
    """
    # One run at a time writes into a folder, so one name will do, and what a kill leaves is overwritten by the next.
    unfinished = path.with_name(f".unfinished{path.suffix}")
    try:
        with unfinished.open(mode, **arguments) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    # A folder can be opened under POSIX only.
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
