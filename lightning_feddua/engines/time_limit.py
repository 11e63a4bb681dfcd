"""An end to clients that hang: an exception in the midst of what they do, and another try."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from lightning_feddua.data.prefetch import WorkerError
from lightning_feddua.errors import ConfigurationError

# Where user code swallows the exception, it comes again after so many seconds.
_AGAIN_SECONDS = 1.0
# How much longer the process waits for a call that Python cannot interrupt, before it ends.
_GRACE_SECONDS = 10.0
# How torch begins to say that a worker of a user's own DataLoader is gone; what a worker raises reads differently.
_WORKER_IS_GONE = "DataLoader worker (pid"

Result = TypeVar("Result")


class ClientTimeoutError(TimeoutError):
    """A client has taken longer than the loop's ``client_timeout``."""


def check_time_limit(seconds: float | None) -> None:
    """One clear error where clients cannot be interrupted."""
    if seconds is None:
        return
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            f"`client_timeout={seconds}` needs SIGALRM, which there is on Linux and macOS, in a process's main thread.",
            "Leave it out, or call `fit` from the main thread of such a machine.",
        )


def is_passing(error: BaseException) -> bool:
    """Whether a client deserves another try: it took too long, or a worker process that read data is gone."""
    if isinstance(error, ClientTimeoutError | WorkerError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(_WORKER_IS_GONE)


@contextmanager
def time_limit(seconds: float | None, client: str, clients: int = 1) -> Iterator[None]:
    """Raise an exception in the block when it takes too long; does nothing without a limit.

    A call that does not return to Python cannot be interrupted. If that lasts, the process ends with the client's name
    and a traceback, and other ranks name it.

    Args:
        seconds: the loop's ``client_timeout``.
        client: the name of a client in it.
        clients: how many there are.

    Raises:
        ClientTimeoutError: when the time of all these clients is up.
    """
    if seconds is None:
        yield
        return
    whole, start = seconds * clients, time.monotonic()

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise ClientTimeoutError(f"it has taken longer than `client_timeout={seconds}`")

    last = threading.Timer(whole + _GRACE_SECONDS, _end_process, (client, whole))
    last.daemon = True
    handler = signal.signal(signal.SIGALRM, interrupt)
    others, interval = signal.setitimer(signal.ITIMER_REAL, whole, _AGAIN_SECONDS)
    last.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        last.cancel()
        if others:
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - start), 1e-3), interval)


def tried_twice(
    function: Callable[[], Result],
    seconds: float | None,
    client: str,
    recover: Callable[[Exception], None] = lambda error: None,
) -> Result:
    """The result of a function that does something with one client; a failure that may pass gets another try.

    Args:
        function: what is done.
        seconds: the loop's ``client_timeout``.
        client: the client's name.
        recover: called with the exception before the other try.
    """
    try:
        with time_limit(seconds, client):
            return function()
    except Exception as error:
        if not is_passing(error):
            raise
        warnings.warn(f"Client `{client}` is tried once more: {error}.", stacklevel=2)
        recover(error)
    with time_limit(seconds, client):
        return function()


def _end_process(client: str, seconds: float) -> None:
    """The last resort."""
    os.write(
        2,
        f"\nClient `{client}` has taken longer than {seconds:g} s and cannot be interrupted in a call that does not"
        " return to Python. The process ends; the traceback shows where it was.\n".encode(),
    )
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    os._exit(1)
