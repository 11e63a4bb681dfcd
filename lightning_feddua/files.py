"""Files that are there as a whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lightning_feddua.errors import ConfigurationError

# What file systems say that keep folders in their own way: some have no `fsync` of them, others do not open them.
_NO_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}
_NO_FOLDERS |= {errno.EISDIR}


@contextmanager
def whole_file(path: Path, mode: str = "w", **arguments: Any) -> Iterator[IO[Any]]:
    """Write a file that is there as a whole or as it was before, even if the machine stops at any instant.

    Args:
        path: the file.
        mode: as in ``open``.
        **arguments: as in ``open``.
    """
    unfinished = _unfinished(path)
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
    sync_folder(path.parent)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Make the folder of a file that is written in this block, or give one clear error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigurationError(
            f"`{path}` cannot be written: {error.strerror or error}.", "Choose another file, or make room for it."
        ) from error


def same_file(source: Path, path: Path) -> None:
    """Give a file that is whole a second name, or make a copy of it where it can have but one."""
    unfinished = _unfinished(path)
    try:
        unfinished.unlink(missing_ok=True)
        os.link(source, unfinished)
    except OSError:
        with source.open("rb") as content, whole_file(path, "wb") as file:
            shutil.copyfileobj(content, file)
        return
    os.replace(unfinished, path)
    sync_folder(path.parent)


def _unfinished(path: Path) -> Path:
    # One run at a time writes into a folder, so one name will do, and what a kill leaves is overwritten by the next.
    return path.with_name(f".unfinished{path.suffix}")


def sync_folder(folder: Path) -> None:
    """Let names in a folder survive a power cut, where the file system has a way to say so."""
    # A folder can be opened under POSIX only.
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDERS:
            raise
