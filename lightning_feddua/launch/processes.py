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
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.multiprocessing import ProcessExitedException

from lightning_feddua._private import starts_processes
from lightning_feddua.launch.preemption import EXIT_CODE, forwarded_sigterm


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
            # Not the parent's handler, which passes the signal on.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            returned = function()
            if fabric.is_global_zero:
                torch.save({**results(), "returned": returned, "model": model.state_dict()}, path)

        others = set(multiprocessing.active_children())
        with forwarded_sigterm(lambda: [p for p in multiprocessing.active_children() if p not in others]) as noted:
            try:
                fabric.launch(run)
            except ProcessExitedException as error:
                if noted.requested or error.exit_code == EXIT_CODE:
                    raise SystemExit(EXIT_CODE) from None
                raise
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    # As in a run without other processes, the model has the run's precision afterwards.
    fabric.strategy.precision.convert_module(model)
    model.load_state_dict(loaded.pop("model"))
    return loaded
