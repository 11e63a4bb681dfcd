"""SIGTERM, by which schedulers take a machine away, and Ctrl-C: the round is finished, saved, and all leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Of one Ctrl-C, a rank may hear twice: from the terminal and from its launcher. Later ones are a second Ctrl-C.
_ONE_PRESS = 1.0

Handler = Callable[[int, FrameType | None], None]


class Preemption:
    """Notes in its ``with`` block that SIGTERM or Ctrl-C has arrived, instead of ending the process at once.

    Before the first round there is nothing to finish, and both end the process by an exception, which tells the other
    ranks; :meth:`wait_for_rounds` changes that. Further SIGTERMs change nothing: a scheduler may send one to every
    process of a job, and torchrun another. A second Ctrl-C ends the process at once.

    Args:
        enabled: whether there is anything to do before the end; otherwise both keep their meaning.
        announce: whether this process answers the first Ctrl-C with a line.
        ending: gives what to raise where a signal ends the process; None where none does.
    """

    def __init__(
        self, enabled: bool, announce: bool = False, ending: Callable[[int], BaseException] | None = None
    ) -> None:
        self._enabled = enabled
        self._announce = announce
        self._ending = ending
        self._restore: Callable[[], object] = lambda: None
        self._pressed: float | None = None
        self.requested = False

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._pressed is not None

    def wait_for_rounds(self, enabled: bool) -> None:
        """From now on let rounds be finished.

        Args:
            enabled: whether there is anything to do before the end; it may have turned out so.
        """
        self._ending = None
        if enabled and not self._enabled:
            self._enabled = True
            self.__enter__()

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        if first and self._ending is not None:
            raise self._ending(number)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._pressed is None:
            self._pressed = time.monotonic()
            if self._ending is not None:
                raise self._ending(number)
            if self._announce:
                # Not `print`, which must not be called again while it runs.
                os.write(2, b"\nCtrl-C: finishing and saving this round first; press again to end at once\n")
        elif time.monotonic() - self._pressed > _ONE_PRESS:
            raise KeyboardInterrupt

    def __enter__(self) -> Preemption:
        handlers: dict[int, Handler] = {signal.SIGTERM: self._note, signal.SIGINT: self._note_interrupt}
        self._restore = _handle(handlers if self._enabled else {})
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: Any) -> None:
        self._restore()
        if kind is None and (self.requested or self.interrupted):
            # It came too late to stop a round, but is not to be lost on what comes after the run.
            signal.raise_signal(signal.SIGTERM if self.requested else signal.SIGINT)


@contextmanager
def forwarded_signals(children: Callable[[], list[Any]]) -> Iterator[Preemption]:
    """Pass SIGTERM and Ctrl-C on to child processes, and wait for them to end; a second Ctrl-C ends them at once.

    Args:
        children: gives the processes to pass it on to.
    """
    noted = Preemption(enabled=False)

    def forward(number: int, frame: FrameType | None) -> None:
        noted.requested = True
        for child in children():
            child.terminate()

    def forward_interrupt(number: int, frame: FrameType | None) -> None:
        first = not noted.interrupted
        try:
            noted._note_interrupt(number, frame)
        except KeyboardInterrupt:
            for child in children():
                child.kill()
        for child in children() if first else []:
            # A terminal has told them, too; whoever has sent it to this process alone has not.
            os.kill(child.pid, signal.SIGINT)

    restore = _handle({signal.SIGTERM: forward, signal.SIGINT: forward_interrupt})
    try:
        yield noted
    finally:
        restore()


def _handle(handlers: dict[int, Handler]) -> Callable[[], object]:
    """Install handlers, and return what puts the previous ones back. Only the main thread may do so."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        # Shells start what runs in the background with Ctrl-C ignored, and so it stays.
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
    }

    def restore() -> None:
        for number, handler in before.items():
            # None: a handler that was not installed by Python, and that Python cannot install again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    return restore
