from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

import torch

from lightning_feddua.__about__ import __version__
from lightning_feddua.aggregation.collectives import gather_objects
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.stopping import resume_command
from lightning_feddua.checkpoints.files import LAST
from lightning_feddua.wording import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from lightning_feddua.loop import FederatedLoop

_REDRAW_SECONDS = 0.1


class ProgressBar(FederatedCallback):
    """A header that says what runs where, then rounds, η_g, loss, rounds a second and the time left, on rank 0.

    On a terminal it is a bar; in a file or a pipe, a line now and then.

    Args:
        refresh_seconds: the time between two lines where there is no terminal.
    """

    def __init__(self, refresh_seconds: float = 10.0) -> None:
        self._refresh_seconds = refresh_seconds
        self._bar: _Bar | None = None

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Print the header."""
        devices = gather_objects(loop.fabric, str(loop.fabric.device))
        if not loop.fabric.is_global_zero:
            return
        for line in header(loop, devices):
            print(line, flush=True)
        self._start = self._last_line = time.monotonic()
        self._first_round = loop.current_round
        # A run that ended in the middle of a hook may have left one.
        self._close()
        if (console := drawing_console(sys.stderr)) is not None:
            self._bar = _Bar(console, loop.max_rounds)
            self._bar.draw(loop.current_round, "starting", "")

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Move on."""
        if not loop.fabric.is_global_zero:
            return
        now, last = time.monotonic(), round + 1 == loop.max_rounds
        if not last and now - self._last_line < (self._refresh_seconds if self._bar is None else _REDRAW_SECONDS):
            return
        self._last_line = now
        rate = (round + 1 - self._first_round) / (now - self._start)
        pace = f"{rate:.3g} rounds/s, {duration((loop.max_rounds - round - 1) / rate)} left"
        numbers = figures(loop.history[-1])
        if self._bar is not None:
            self._bar.draw(round + 1, pace, numbers)
        else:
            print(f"round {round + 1}/{loop.max_rounds}  {numbers}  {pace}", flush=True)

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Say where the results are."""
        self._close()
        if loop.fabric.is_global_zero:
            print("fast_dev_run: nothing was kept" if loop.fast_dev_run else f"results in {loop.run_dir}", flush=True)
            # A run that was stopped says so itself, and why.
            if not loop.stopping and (loop.run_dir / LAST).exists():
                print(f"to train longer: {resume_command(loop.run_dir, 2 * loop.max_rounds or 1)}", flush=True)

    def on_exception(self, loop: FederatedLoop, exception: BaseException) -> None:
        """Leave the terminal in order."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Bar:
    """A line with the bar and, below it, one with the numbers: both fit into 80 columns."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.live import Live

        self._total = total
        # Drawn between rounds and not by a thread, which would not go well with the forks of worker processes. What
        # others print goes above the bar, but stays in its file if that is where it goes.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._live.start()

    def draw(self, done: int, pace: str, numbers: str) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, 1, None):
            line.add_column(no_wrap=True, ratio=ratio)
        line.add_row(f"round {done}/{self._total}", bar(done, self._total), pace)
        self._live.update(Group(line, Text(numbers, no_wrap=True, overflow="ellipsis")), refresh=True)

    def close(self) -> None:
        self._live.stop()


def drawing_console(stream: TextIO) -> Console | None:
    """A console on a stream where things can be drawn; None for a file, a pipe or a dumb terminal."""
    if not stream.isatty():
        return None
    # Only here, where something is drawn: most imports of this package draw nothing.
    from rich.console import Console

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return console if console.is_interactive else None


def bar(done: int, total: int, width: int | None = None) -> RenderableType:
    """A bar, as wide as there is room if no width is given."""
    from rich.progress_bar import ProgressBar as RichBar

    return RichBar(total=max(total, 1), completed=done, width=width)


def header(loop: FederatedLoop, devices: list[str]) -> list[str]:
    """What runs where, in a few lines."""
    module, fabric = loop.module, loop.fabric
    assert module is not None
    assert loop.datamodule is not None
    trainable = loop.run.known_weights.numel()
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    work = (
        counted(loop.local_epochs, "local epoch")
        if loop.local_steps is None
        else counted(loop.local_steps, "local step")
    )
    ranks = ", ".join(f"{devices.count(d)} x {d}" if devices.count(d) > 1 else d for d in dict.fromkeys(devices))
    return [
        f"lightning-feddua {__version__}: {type(loop.server).__name__} on {type(module).__name__}",
        f"  parameters  {trainable:,} trainable, {frozen:,} frozen, precision {fabric.strategy.precision.precision}",
        f"  cohort      {loop.sampler.describe(len(loop.client_ids))} clients per round, {work} of batches of"
        f" {loop.datamodule.batch_size}, seed {loop.seed}",
        f"  engine      {loop.engine_note}, on {fabric.world_size} rank{'s' * (fabric.world_size > 1)}: {ranks}",
        *([f"  bits        {doubt}"] if (doubt := _doubt(loop)) else []),
        f"  results     {_nothing_kept(loop) or loop.run_dir}",
    ]


def _doubt(loop: FederatedLoop) -> str:
    """On what the bits of the result depend besides settings and data, if on anything."""
    threads = loop.threads is None and loop.fabric.device.type == "cpu" and torch.get_num_threads() > 1
    reasons = [f"{torch.get_num_threads()} threads"] if threads else []
    reasons += ["the number of ranks"] if loop.backend.depends_on_ranks else []
    reasons += ["the device's algorithms"] if loop.fabric.device.type != "cpu" and not loop.reproducible else []
    unsteady = loop._federation.unsteady_client if loop._federation is not None else None
    reasons += [f"how often the data of client `{unsteady}` was read"] if unsteady is not None else []
    does = "removes" if unsteady is None else "refuses"
    return f"depend on {' and '.join(reasons)}; `reproducible=True` {does} that" if reasons else ""


def _nothing_kept(loop: FederatedLoop) -> str:
    return f"none are kept (fast_dev_run={loop.fast_dev_run})" if loop.fast_dev_run else ""


def glance(row: Mapping[str, float]) -> dict[str, str]:
    """The numbers of a round that are worth a glance."""
    names = ["eta_g", "loss", *(name for name in row if name.startswith("val_"))]
    return {name: f"{row[name]:.3g}" for name in dict.fromkeys(names) if name in row}


def figures(row: Mapping[str, float]) -> str:
    """The same in a line."""
    return "  ".join(f"{name} {number}" for name, number in glance(row).items())


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
