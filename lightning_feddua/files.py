"""Files that are there as a whole or not at all, and locks that one process at a time can hold."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_RETRY_SECONDS = 0.1


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


@contextmanager
def locked(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock in this block, or until this process and all that were forked from it have ended.

    Windows and some network file systems have no such locks; there, the block runs without one.

    Args:
        path: a folder, or a file that is made if there is none.
        seconds: how long to wait for another process.

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + seconds
        while not _take(descriptor):
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
            time.sleep(_RETRY_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Any other error: the file system has no locks, and a run is better than none.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
