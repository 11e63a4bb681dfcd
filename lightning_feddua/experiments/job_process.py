"""The process of a job: forked, in a group of its own, and gone when the command that started it is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from lightning_feddua.errors import ConfigurationError

# The two ends of a pipe that the command holds open for as long as it runs.
Lifeline = tuple[int, int]


def check_can_fork() -> None:
    """One clear error for a system without forks, such as Windows."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError(
            "Many runs at once need forked processes, which this system does not have.",
            "Use Linux, macOS or WSL, or run one method at a time with `feddua fit`.",
        )


@contextmanager
def lifeline() -> Iterator[Lifeline]:
    """What processes watch to end with this one, however it ends."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(writing)
        os.close(reading)


def start(work: Callable[[], int], log: Path, ends: Lifeline) -> BaseProcess:
    """Fork a process that works, with its output in a file, and exits with the code that the work returns."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(work, log, ends))
    process.start()
    return process


def end(process: BaseProcess) -> int | None:
    """Make sure that nothing is left of a process, which may have ended, and return its exit code."""
    if process.pid is not None:
        # Before it is reaped, when its number could already be another's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if wait([process.sentinel], timeout=0) == []:
        process.kill()
    process.join()
    return process.exitcode


def _run(work: Callable[[], int], log: Path, ends: Lifeline) -> None:
    # A group of its own, which Ctrl-C at the terminal does not reach and which ends as a whole.
    os.setsid()
    reading, writing = ends
    os.close(writing)
    threading.Thread(target=_end_with_parent, args=(reading,), daemon=True).start()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    sys.exit(work())


def _end_with_parent(reading: int) -> None:
    """Nothing is ever written, so that reading ends only when the parent does."""
    os.read(reading, 1)
    os.killpg(0, signal.SIGKILL)
