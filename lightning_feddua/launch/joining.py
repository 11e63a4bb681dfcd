"""How ranks find each other: through a store of their own making, in which those that do not come can be named."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from lightning_feddua._private import process_group_backend
from lightning_feddua.aggregation.collectives import barrier
from lightning_feddua.aggregation.presence import (
    exchange,
    in_time,
    patience,
    session,
    store_keeper,
    use_store,
    uses_store_of_torchrun,
)
from lightning_feddua.errors import RankError


def join_when_launched(fabric: Fabric) -> None:
    """Let Fabric find the process group made when it sets up a rank, in whatever way the rank was started."""
    strategy = fabric.strategy
    if not isinstance(strategy, DDPStrategy):
        return
    set_up = strategy.setup_environment

    def setup_environment() -> None:
        if not torch.distributed.is_initialized():
            _join(fabric, strategy)
        set_up()

    strategy.setup_environment = setup_environment  # type: ignore[method-assign]


def _join(fabric: Fabric, strategy: DDPStrategy) -> None:
    """Make the process group.

    Raises:
        RankError: a rank has not come within the loop's timeout.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    environment.set_global_rank(strategy.node_rank * strategy.num_processes + strategy.local_rank)
    environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    device = None if strategy.root_device.type == "cpu" else strategy.root_device
    store = _store(fabric, strategy)
    use_store(store)

    def make() -> None:
        torch.distributed.init_process_group(
            process_group_backend(strategy),
            store=store,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            timeout=patience(fabric),
            device_id=device,
        )

    with session(fabric):
        with exchange(fabric):
            in_time(fabric, make)
        barrier(fabric)


def _store(fabric: Fabric, strategy: DDPStrategy) -> Any:
    """The store that keeps the ranks together: with rank 0, or with torchrun.

    torchrun's outlives the processes that it starts anew, with their addresses in it. A rank that reads one of these
    before the new one is there cannot connect, so each attempt gets keys of its own.
    """
    environment, of_torchrun = strategy.cluster_environment, uses_store_of_torchrun()
    assert environment is not None
    connect = partial(
        torch.distributed.TCPStore,
        environment.main_address,
        environment.main_port,
        strategy.world_size,
        is_master=strategy.global_rank == 0 and not of_torchrun,
        timeout=patience(fabric),
        wait_for_workers=False,
        multi_tenant=not of_torchrun,
    )
    try:
        store = in_time(fabric, connect)
    except RuntimeError as error:
        if strategy.global_rank == 0 and not of_torchrun:
            raise
        raise RankError(f"{store_keeper()} has ended, or does not answer within the loop's `timeout`.") from error
    return torch.distributed.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
