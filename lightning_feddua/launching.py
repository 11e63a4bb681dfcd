"""The one Fabric of a loop, launched plainly, by Fabric itself or by torchrun."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_feddua.errors import ConfigurationError


def make_fabric(
    *, accelerator: Any, strategy: Any, devices: Any, num_nodes: int, precision: Any, callbacks: Any, loggers: Any
) -> Fabric:
    """A Fabric whose ranks are those of torchrun where torchrun started this process.

    Left to itself, Fabric takes one device for ``devices="auto"`` on a CPU, and torchrun's processes would each train
    alone without a word.
    """
    if TorchElasticEnvironment.detect():
        devices, num_nodes = _match_torchrun(devices, num_nodes)
    arguments = {"accelerator": accelerator, "strategy": strategy, "devices": devices, "precision": precision}
    try:
        fabric = Fabric(**arguments, num_nodes=num_nodes, callbacks=callbacks, loggers=loggers)
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        problem = " ".join(str(error).split()).rstrip(".")
        raise ConfigurationError(
            f"Fabric cannot start with {given}: {problem}.", "Change the one that does not fit this machine."
        ) from error
    if getattr(fabric.strategy, "_start_method", None) in ("spawn", "forkserver"):
        raise ConfigurationError(
            f"The strategy `{strategy}` starts processes that cannot see the model.", "Use `ddp` or `ddp_fork`."
        )
    if not isinstance(fabric.strategy, SingleDeviceStrategy | DDPStrategy):
        raise ConfigurationError(
            f"The strategy `{type(fabric.strategy).__name__}` splits one model over ranks.",
            "Use `auto` or `ddp`: here each rank trains whole clients.",
        )
    return fabric


def leave_process_group() -> None:
    """Close the connections to other ranks at the end of the process; gloo may abort where they are left open."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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
            returned = function()
            if fabric.is_global_zero:
                torch.save({**results(), "returned": returned, "model": model.state_dict()}, path)

        fabric.launch(run)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    # As in a run without other processes, the model has the run's precision afterwards.
    fabric.strategy.precision.convert_module(model)
    model.load_state_dict(loaded.pop("model"))
    return loaded


def _match_torchrun(devices: Any, num_nodes: int) -> tuple[Any, int]:
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // local
    if devices in ("auto", -1, "-1"):
        devices = local
    if isinstance(devices, str):
        devices = [int(d) for d in devices.split(",")] if "," in devices else int(devices)
    count = len(devices) if isinstance(devices, list) else int(devices)
    if count != local:
        raise ConfigurationError(
            f"`devices={devices}` does not match torchrun, which started {local} processes on this node.",
            "Leave `devices` out, or start torchrun with the same `--nproc-per-node`.",
        )
    if num_nodes not in (1, nodes):
        raise ConfigurationError(
            f"`num_nodes={num_nodes}` does not match torchrun, which started {nodes} nodes.",
            "Leave `num_nodes` out, or start torchrun with the same `--nnodes`.",
        )
    return devices, nodes
