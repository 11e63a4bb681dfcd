"""A terminal that is not there, for what is drawn on one."""

import os
import pty
import re
import threading
from contextlib import contextmanager


class Screen:
    """All that was written to a terminal."""

    def __init__(self):
        self.raw = ""

    @property
    def text(self):
        """Without what moves the cursor and sets colours."""
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.raw)


@contextmanager
def pseudo_terminal():
    """A stream that is a terminal, and what will have been written there at the end.

    Its width is that of the test's own, or `COLUMNS`: rich asks the process, not the stream.
    """
    master, slave = pty.openpty()
    screen, pieces = Screen(), []

    def read():
        # Linux says with an error that the other side is closed, others with nothing.
        try:
            while piece := os.read(master, 65_536):
                pieces.append(piece)
        except OSError:
            pass

    # What nobody reads would stop the writer.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with os.fdopen(slave, "w") as stream:
            yield stream, screen
    finally:
        reader.join(10)
        os.close(master)
        screen.raw = b"".join(pieces).decode()


def able_terminal(monkeypatch, columns=80):
    """Terminals differ in what they allow; this one allows everything, wherever the test runs."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES"):
        monkeypatch.delenv(name, raising=False)
