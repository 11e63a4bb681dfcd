"""Whether the process that a file names is alive, on this machine or another."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

_LOOK_SECONDS = 0.2


def own_name() -> str:
    """This process, as no other is called."""
    return json.dumps({"host": _host(), "pid": os.getpid(), "started": _start(os.getpid())})


def is_alive(file: Path, seconds: float) -> bool:
    """Whether the process that has written its name into a file is alive.

    Args:
        file: the file.
        seconds: how long to wait for a sign of life, a new time of the file, of a process on another machine.
    """
    try:
        text, first = _look(file)
    except FileNotFoundError:
        return False
    try:
        owner = json.loads(text)
        if os.name == "posix" and owner["host"] == _host():
            return owner["started"] == _start(owner["pid"]) and _exists(owner["pid"])
    except (ValueError, KeyError, TypeError):
        # It is being written, or its writer was killed before it came to that.
        pass
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        try:
            if _look(file) != (text, first):
                return True
        except FileNotFoundError:
            return False
    return False


def _look(file: Path) -> tuple[str, int]:
    # Opened anew, because network file systems may answer from memory about a file that is not.
    with file.open() as opened:
        return opened.read(), os.fstat(opened.fileno()).st_mtime_ns


def _host() -> str:
    """This machine since it was started, and the part of it where process numbers are unique."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(found)


def _start(pid: int) -> str | None:
    """When a process was started, where the operating system tells: numbers are given again."""
    try:
        # The name before it, in parentheses, may have spaces.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
