"""Forked ranks, and what they bring home."""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from torch.multiprocessing import ProcessExitedException

from lightning_feddua._private import starts_processes
from lightning_feddua.launch.exits import EXIT_CODE
from lightning_feddua.launch.preemption import forwarded_signals
from lightning_feddua.lightning_names import is_overridden


def forks(fabric: Fabric) -> bool:
    """Whether Fabric forks its ranks from this process, which then only waits for them."""
    return starts_processes(fabric.strategy)


def run_in_processes(
    fabric: Fabric, function: Callable[[], Any], model: LightningModule, results: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Run a function in forked ranks, and bring the model of rank 0 and its results home by a file.

    Args:
        fabric: a Fabric that forks its ranks.
        function: what each rank does.
        model: a model that it changes.
        results: what rank 0 has to say besides; the function's own result is added as ``returned``.
    """
    if is_overridden("configure_model", model):
        model.configure_model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.pt"

        def run(fabric: Fabric) -> None:
            # Not the parent's handlers, which pass signals on.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                returned = function()
            except KeyboardInterrupt:
                # Not passed on: to torch, it is the end of a process that has done its work, and Fabric waits for more.
                return
            if fabric.is_global_zero:
                torch.save({**results(), "returned": returned, "model": model.state_dict()}, path)

        others = set(multiprocessing.active_children())
        with forwarded_signals(lambda: [p for p in multiprocessing.active_children() if p not in others]) as noted:
            try:
                fabric.launch(run)
            except ProcessExitedException as error:
                if noted.interrupted:
                    raise KeyboardInterrupt from None
                if noted.requested or error.exit_code == EXIT_CODE:
                    raise SystemExit(EXIT_CODE) from None
                raise
        if not path.exists():
            raise KeyboardInterrupt
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    # As in a run without other processes, the model has the run's precision afterwards.
    fabric.strategy.precision.convert_module(model)
    model.load_state_dict(loaded.pop("model"))
    return loaded
