from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tqdm import tqdm

from lightning_feddua.__about__ import __version__
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.collectives import gather_objects

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class ProgressBar(FederatedCallback):
    """A header that says what runs where, then rounds, η_g, loss, rounds a second and the time left, on rank 0.

    On a terminal it is a bar; in a file or a pipe, a line now and then.

    Args:
        refresh_seconds: the time between two lines where there is no terminal.
    """

    def __init__(self, refresh_seconds: float = 10.0) -> None:
        self._refresh_seconds = refresh_seconds
        self._bar: tqdm | None = None

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Print the header."""
        devices = gather_objects(loop.fabric, str(loop.fabric.device))
        if not loop.fabric.is_global_zero:
            return
        for line in header(loop, devices):
            print(line, flush=True)
        self._start = self._last_line = time.monotonic()
        self._first_round = loop.current_round
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=loop.max_rounds, initial=loop.current_round, unit="round", dynamic_ncols=True, file=sys.stderr
            )

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Move on."""
        if not loop.fabric.is_global_zero:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(figures(loop.history[-1]), refresh=False)
            self._bar.update()
        elif time.monotonic() - self._last_line >= self._refresh_seconds or round + 1 == loop.max_rounds:
            self._last_line = time.monotonic()
            rate = (round + 1 - self._first_round) / (self._last_line - self._start)
            left = (loop.max_rounds - round - 1) / rate
            numbers = figures(loop.history[-1])
            print(
                f"round {round + 1}/{loop.max_rounds}  {numbers}  {rate:.3g} rounds/s, {duration(left)} left",
                flush=True,
            )

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Say where the results are."""
        self._close()
        if loop.fabric.is_global_zero:
            print(f"results in {loop.run_dir}", flush=True)

    def on_exception(self, loop: FederatedLoop, exception: BaseException) -> None:
        """Leave the terminal in order."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def header(loop: FederatedLoop, devices: list[str]) -> list[str]:
    """What runs where, in a few lines."""
    module, fabric = loop.module, loop.fabric
    trainable = loop.weights.numel()
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    work = f"{loop.local_steps} local steps" if loop.local_steps is not None else f"{loop.local_epochs} local epochs"
    ranks = ", ".join(f"{devices.count(d)} x {d}" if devices.count(d) > 1 else d for d in dict.fromkeys(devices))
    return [
        f"lightning-feddua {__version__}: {type(loop.server).__name__} on {type(module).__name__}",
        f"  parameters  {trainable:,} trainable, {frozen:,} frozen, precision {fabric.strategy.precision.precision}",
        f"  cohort      {loop.cohort_size} of {len(loop.client_ids)} clients a round, {work} of batches of"
        f" {loop.datamodule.batch_size}, seed {loop.seed}",
        f"  engine      {loop.engine_note}, on {fabric.world_size} rank{'s' * (fabric.world_size > 1)}: {ranks}",
        f"  results     {loop.run_dir}",
    ]


def figures(row: Mapping[str, float]) -> str:
    """The numbers of a round that are worth a glance."""
    names = ["eta_g", "loss", *(name for name in row if name.startswith("val_"))]
    return "  ".join(f"{name} {row[name]:.3g}" for name in dict.fromkeys(names) if name in row)


def duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
