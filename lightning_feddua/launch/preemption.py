"""SIGTERM, by which schedulers announce that a machine is taken away: the round is finished, saved, and all leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# What a shell reports of a process that SIGTERM has ended.
EXIT_CODE = 128 + signal.SIGTERM


class Preemption:
    """Notes in its ``with`` block that SIGTERM has arrived, instead of ending the process at once.

    Further signals change nothing: a scheduler may send one to every process of a job, and torchrun another.

    Args:
        enabled: whether there is anything to do before the end; otherwise SIGTERM keeps its meaning.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.requested = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __enter__(self) -> Preemption:
        self._restore = _handle_sigterm(self._note) if self._enabled else lambda: None
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: Any) -> None:
        self._restore()
        if self.requested and kind is None:
            # It came too late to stop a round, but is not to be lost on what comes after the run.
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def forwarded_sigterm(children: Callable[[], list[Any]]) -> Iterator[Preemption]:
    """Pass SIGTERM on to child processes, and wait for them to end.

    Args:
        children: gives the processes to pass it on to.
    """
    noted = Preemption(enabled=False)

    def forward(number: int, frame: FrameType | None) -> None:
        noted.requested = True
        for child in children():
            child.terminate()

    restore = _handle_sigterm(forward)
    try:
        yield noted
    finally:
        restore()


def _handle_sigterm(handler: Callable[[int, FrameType | None], None]) -> Callable[[], object]:
    """Install a handler, and return what puts the previous one back. Only the main thread may do so."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.signal(signal.SIGTERM, handler)
    # None: a handler that was not installed by Python, and that Python cannot install again.
    return lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
