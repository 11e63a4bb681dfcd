"""The progress of many runs: on a terminal a table that moves, elsewhere a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_feddua.callbacks.progress import bar, drawing_console, duration, figures, glance

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_BAR_WIDTH = 12


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come.

    Args:
        name: what it is called.
        rounds: how many are done.
        of: how many there will be.
        metrics: of the last round; empty before the first.
        seconds: since its start.
    """

    name: str
    rounds: int
    of: int
    metrics: Mapping[str, float]
    seconds: float

    @property
    def left(self) -> str:
        """The time to its end, or nothing where it is not known."""
        return duration(self.seconds / self.rounds * (self.of - self.rounds)) if self.rounds else ""


class LiveDisplay:
    """A row for each run at work, below the lines of those that are over.

    Args:
        refresh_seconds: the time between two reports where there is no terminal.
    """

    def __init__(self, refresh_seconds: float = 30.0) -> None:
        self._refresh_seconds = refresh_seconds
        self._live: Live | None = None
        self._done = 0
        self._total = 0
        self._last = time.monotonic()

    def start(self, total: int, reused: int) -> None:
        """Say how much there is to do."""
        self._total, self._done = total, reused
        known = f", {reused} of them finished before" if reused else ""
        self._say(f"{total} run{'s' * (total != 1)}{known}")
        if reused < total and (console := drawing_console(sys.stdout)) is not None:
            from rich.live import Live

            # Without the thread that would draw by itself: runs are forked from this process.
            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty())
            self._live.start()

    def finished(self, run: RunProgress) -> None:
        """A run has come to its end."""
        self._done += 1
        self._say(f"[{self._done}/{self._total}] {run.name}  {figures(run.metrics)}  in {duration(run.seconds)}")

    def failed(self, name: str, problem: str, log: Path) -> None:
        """A run has not."""
        self._done += 1
        self._say(f"[{self._done}/{self._total}] {name}  FAILED: {problem} (log: {log})", style="red")

    def show(self, running: Sequence[RunProgress]) -> None:
        """Draw the runs at work."""
        if self._live is not None:
            self._live.update(self._table(running), refresh=True)
        elif time.monotonic() - self._last >= self._refresh_seconds:
            self._last = time.monotonic()
            width = max((len(run.name) for run in running), default=0)
            for run in running:
                numbers = figures(run.metrics) or "starting"
                left = f"  {run.left} left" if run.left else ""
                print(f"{run.name:{width}}  {run.rounds}/{run.of}  {numbers}{left}", flush=True)

    def close(self) -> None:
        """Leave the lines of finished runs alone on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, running: Sequence[RunProgress]) -> Table:
        from rich import box
        from rich.table import Table

        numbers = [glance(run.metrics) for run in running]
        names = list(dict.fromkeys(name for row in numbers for name in row))
        caption = f"{self._done} of {self._total} runs are over"
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
        # A long name is folded, so that numbers are not.
        table.add_column("run", overflow="fold")
        table.add_column("")
        for name in ("round", *names, "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for run, row in zip(running, numbers, strict=True):
            rounds = f"{run.rounds}/{run.of}" if run.rounds else "starting"
            cells = [row.get(name, "") for name in names]
            table.add_row(run.name, bar(run.rounds, run.of, _BAR_WIDTH), rounds, *cells, run.left)
        return table

    def _say(self, line: str, style: str | None = None) -> None:
        if self._live is not None:
            # Soft: the terminal folds the line, and a path in it can be copied.
            self._live.console.print(line, style=style, soft_wrap=True)
        else:
            print(line, flush=True)
