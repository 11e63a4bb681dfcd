"""The one Fabric of a loop, launched plainly, by Fabric itself or by torchrun."""

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

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
