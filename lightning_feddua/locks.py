"""Locks that one process at a time can hold, and that are free as soon as it has ended, however it ends."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_feddua.lock_owner import is_alive, own_name

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:
    msvcrt = None  # type: ignore[assignment]

# Of a folder.
_LOCK_FILE = ".lock"
_RETRY_SECONDS = 0.1
# The owner of a lock without help of the operating system shows this often that it is alive.
_BEAT_SECONDS = 2.0
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)
# Locks of the operating system do not keep a process from its own: files that are locked here, with the process.
_held: set[tuple[int, str]] = set()
_guard = threading.Lock()


@contextmanager
def locked(path: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock in this block, at most until this process ends. Processes forked from it do not hold it.

    Locks are those of the operating system, which work over network file systems, too. Where the file system has none,
    a file names the process that holds the lock.

    Args:
        path: a folder, or a file that is gone afterwards.
        seconds: how long to wait for another process.

    Raises:
        BlockingIOError: another process holds it, or this one already does.
    """
    file = path / _LOCK_FILE if path.is_dir() else path
    key = (os.getpid(), str(file.resolve()))
    deadline = time.monotonic() + seconds
    while (release := _try(key, file)) is None:
        if time.monotonic() >= deadline:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        time.sleep(_RETRY_SECONDS)
    try:
        yield
    finally:
        # A process that was forked in the block may leave it, too.
        if os.getpid() == key[0]:
            release()
            _held.discard(key)


def _try(key: tuple[int, str], file: Path) -> Callable[[], None] | None:
    """What frees the lock that was taken; None if it is somebody else's."""
    with _guard:
        # Already the closing of a second descriptor of the file would free the lock.
        if key in _held:
            return None
        try:
            release = _take(file)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL):
                raise
            release = _take_without_help(file.with_name(f"{file.name}.owner"))
        if release is not None:
            _held.add(key)
        return release


def _take(file: Path) -> Callable[[], None] | None:
    """Take a lock of the operating system, which ends with the process and is not inherited."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor)
        # Whoever held it before may have removed the file, and somebody else made another.
        if not os.path.samestat(os.fstat(descriptor), os.stat(file)):
            raise FileNotFoundError
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, FileNotFoundError) or error.errno in _TAKEN:
            return None
        with suppress(OSError):
            file.unlink()
        raise

    def release() -> None:
        # Windows does not remove a file that is open.
        with suppress(OSError):
            file.unlink()
        os.close(descriptor)

    return release


def _lock(descriptor: int) -> None:
    if fcntl is not None:
        # Unlike those of `flock`, these locks are not inherited by data workers that outlive a killed run.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _take_without_help(file: Path) -> Callable[[], None] | None:
    """Take a lock that consists of a file with the owner's name, unless a living process has it."""
    name = own_name()
    try:
        with file.open("x") as new:
            new.write(name)
    except FileExistsError:
        if is_alive(file, 5 * _BEAT_SECONDS):
            return None
        _bury(file)
        return None if file.exists() else _take_without_help(file)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            with suppress(OSError):
                os.utime(file)

    threading.Thread(target=beat, daemon=True).start()

    def release() -> None:
        ended.set()
        with suppress(OSError):
            file.unlink()

    return release


def _bury(file: Path) -> None:
    """Remove the file of an owner that has ended, unless another process has just replaced it by its own."""
    grave = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        before = file.stat()
        os.rename(file, grave)
        if os.path.samestat(before, grave.stat()):
            grave.unlink()
        else:
            os.rename(grave, file)
