"""The one Fabric of a loop, launched plainly, by Fabric itself or by torchrun."""

from __future__ import annotations

import os
from dataclasses import fields
from datetime import timedelta
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_feddua._private import (
    set_process_group_timeout,
    start_method,
)
from lightning_feddua.aggregation.collectives import barrier, guard
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.launch.exits import ending
from lightning_feddua.launch.joining import join_when_launched
from lightning_feddua.wording import counted

if TYPE_CHECKING:
    from lightning_feddua.settings import RunSettings


def make_fabric(settings: RunSettings) -> Fabric:
    """A Fabric whose ranks are those of torchrun where torchrun started this process.

    Left to itself, Fabric takes one device for ``devices="auto"`` on a CPU, and torchrun's processes would each train
    alone, silently.
    """
    devices, num_nodes, strategy = settings.devices, settings.num_nodes, settings.strategy
    if TorchElasticEnvironment.detect():
        devices, num_nodes = _match_torchrun(devices, num_nodes)
    _check_count(devices)
    arguments: dict[str, Any] = {"accelerator": settings.accelerator, "strategy": strategy, "devices": devices}
    # Fabric takes names there, and objects here.
    arguments["plugins" if isinstance(settings.precision, Precision) else "precision"] = settings.precision
    try:
        fabric = Fabric(**arguments, num_nodes=num_nodes, loggers=settings.loggers)
    except Exception as error:
        given = ", ".join(f"{name}={_named(value)}" for name, value in arguments.items())
        problem = " ".join(str(error).split()).rstrip(".!")
        raise ConfigurationError(
            f"Fabric cannot start with {given}: {problem}.", "Change the one that does not fit this machine."
        ) from error
    if start_method(fabric.strategy) in ("spawn", "forkserver"):
        raise ConfigurationError(
            f"The strategy {_named(strategy)} starts processes that cannot see the model.", "Use `ddp` or `ddp_fork`."
        )
    if not isinstance(fabric.strategy, SingleDeviceStrategy | DDPStrategy):
        raise ConfigurationError(
            f"The strategy `{type(fabric.strategy).__name__}` splits one model over ranks.",
            "Use `auto` or `ddp`: here each rank trains whole clients.",
        )
    default = next(one.default for one in fields(settings) if one.name == "timeout")
    if isinstance(fabric.strategy, DDPStrategy) and (isinstance(strategy, str) or settings.timeout != default):
        # Of the process group, which is made when Fabric is launched.
        set_process_group_timeout(fabric.strategy, timedelta(seconds=settings.timeout))
    guard(fabric)
    join_when_launched(fabric)
    return fabric


# Settings of a gradient scaler; its scale changes while it is used. One that is switched off has no state.
_SCALER = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def _named(value: Any) -> str:
    """An argument of Fabric in a message: an object by its class."""
    return repr(value) if isinstance(value, str | int | list | None) else f"{type(value).__name__}()"


def precision_name(fabric: Fabric) -> str:
    """What is meant by a precision's other name, or by a plugin, in words that do not change from run to run."""
    plugin = fabric.strategy.precision
    scaler = getattr(plugin, "scaler", None)
    notes = [] if type(plugin).__module__.startswith("lightning.") else [type(plugin).__qualname__]
    if scaler is not None:
        state = scaler.state_dict()
        notes += [f"{name} {state[name]}" for name, usual in _SCALER.items() if state.get(name, usual) != usual]
    return " ".join([str(plugin.precision), *notes])


def leave(fabric: Fabric, signal_number: int, rounds: int, command: str) -> NoReturn:
    """End the process after SIGTERM, or raise KeyboardInterrupt; all ranks do so after the same round.

    Args:
        fabric: for the exchange.
        signal_number: which of the two.
        rounds: how many are saved.
        command: what resumes the run.
    """
    name = "SIGTERM" if signal_number == SIGTERM else "Ctrl-C"
    rank_zero_info(f"{name}: saved after {counted(rounds, 'round')}. Resume with `{command}`.")
    # Nobody leaves before the checkpoint is written: launchers end the others when one is gone.
    barrier(fabric)
    raise ending(fabric, signal_number)


def leave_process_group() -> None:
    """Close the connections to other ranks at the end of the process; gloo may abort where they are left open."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _check_count(devices: Any) -> None:
    """Fabric would start any number of processes on a CPU, until the machine stands still."""
    cores = os.cpu_count() or 1
    most = max(64, 4 * cores)
    if str(devices).isdecimal() and int(devices) > most:
        raise ConfigurationError(
            f"`devices={devices}` is more than a machine with {cores} cores can serve.",
            f"Give the number of GPUs or, on a CPU, of processes; {most} at most.",
        )


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
