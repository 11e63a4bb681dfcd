"""Calls a function on all ranks of a run, in whatever way the strategy starts them."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from lightning import LightningModule
from lightning.fabric import Fabric

from lightning_feddua.aggregation.collectives import barrier
from lightning_feddua.aggregation.presence import session
from lightning_feddua.launch.fabric import leave_process_group
from lightning_feddua.launch.processes import forks, run_in_processes


class Launcher:
    """Starts the ranks at the first call, where they are not there yet.

    Args:
        fabric: the one Fabric of a loop.
        results: what the caller knows after a call, as tensors and plain values.
        take: gives it to the caller in the parent of forked ranks.
    """

    def __init__(
        self, fabric: Fabric, results: Callable[[], dict[str, Any]], take: Callable[[dict[str, Any]], None]
    ) -> None:
        self._fabric = fabric
        self._results = results
        self._take = take
        self._launched = False

    def call(self, function: Callable[..., Any], model: LightningModule, *arguments: Any) -> Any:
        """Call a function with a model on every rank, and return what it returns on this one."""
        if forks(self._fabric):
            found = run_in_processes(
                self._fabric, lambda: self._call(function, model, *arguments), model, self._results
            )
            returned = found.pop("returned")
            self._take(found)
            return returned
        if not self._launched:
            self._fabric.launch()
            self._launched = True
            atexit.register(leave_process_group)
        return self._call(function, model, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with session(self._fabric):
            result = function(*arguments)
            # Ranks leave together, so that none closes its connections on another's last exchange.
            barrier(self._fabric)
            return result
