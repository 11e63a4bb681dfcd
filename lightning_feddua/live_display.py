"""The progress of many runs: on a terminal lines that move, elsewhere a plain line now and then."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_feddua.callbacks.progress import duration

_BAR = 20


class LiveDisplay:
    """A line for each run at work, below the lines of those that are over.

    Args:
        refresh_seconds: the time between two reports where there is no terminal.
    """

    def __init__(self, refresh_seconds: float = 30.0) -> None:
        self._refresh_seconds = refresh_seconds
        self._terminal = sys.stdout.isatty()
        self._drawn = 0
        self._done = 0
        self._total = 0
        self._last = time.monotonic()

    def start(self, total: int, reused: int) -> None:
        """Say how much there is to do."""
        self._total, self._done = total, reused
        known = f", {reused} of them finished before" if reused else ""
        self._say(f"{total} run{'s' * (total != 1)}{known}")

    def finished(self, name: str, numbers: str, seconds: float) -> None:
        """A run has come to its end."""
        self._done += 1
        self._say(f"[{self._done}/{self._total}] {name}  {numbers}  in {duration(seconds)}")

    def failed(self, name: str, problem: str, log: Path) -> None:
        """A run has not."""
        self._done += 1
        self._say(f"[{self._done}/{self._total}] {name}  FAILED: {problem} (log: {log})")

    def show(self, running: Sequence[tuple[str, int, str, int, float]]) -> None:
        """Draw the runs at work: name, rounds done, metrics, rounds in all, seconds so far."""
        if not self._terminal and time.monotonic() - self._last < self._refresh_seconds:
            return
        self._last = time.monotonic()
        width = max((len(name) for name, *_ in running), default=0)
        lines = []
        for name, rounds, numbers, of, seconds in running:
            filled = _BAR * rounds // max(of, 1)
            left = f"  {duration(seconds / rounds * (of - rounds))} left" if rounds else ""
            bar = f"{'█' * filled}{'░' * (_BAR - filled)} " if self._terminal else ""
            lines.append(f"{name:{width}}  {bar}{rounds}/{of}  {numbers}{left}")
        if self._terminal:
            self._erase()
            columns, rows = shutil.get_terminal_size()
            lines = lines[: max(rows - 2, 1)]
            self._drawn = len(lines)
            print("".join(f"{line[: columns - 1]}\n" for line in lines), end="", flush=True)
        else:
            for line in lines:
                print(line, flush=True)

    def close(self) -> None:
        """Leave the lines of finished runs alone on the screen."""
        self._erase()

    def _say(self, line: str) -> None:
        self._erase()
        print(line, flush=True)

    def _erase(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}F\x1b[J", end="", flush=True)
            self._drawn = 0
