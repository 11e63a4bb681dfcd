"""What a client sees of other ranks: nothing. Its collectives are those of a world of one, as in its own Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_feddua._private import in_place_of_the_world, lone_group
from lightning_feddua.aggregation.presence import exchange, in_time


class WorldOfOne:
    """Lets a rank be alone while user code runs, whose collectives other ranks know nothing of.

    Inside ``with world_of_one.entered():`` torch's default process group has this rank alone in it. The loop's own
    exchanges happen outside. Without a process group there is nothing to do.

    Args:
        fabric: tells whether there are other ranks.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._group = None
        if fabric.world_size > 1:
            with exchange(fabric):
                self._group = in_time(fabric, lone_group)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be alone in here."""
        if self._group is None:
            yield
            return
        # In a world of one it is a BatchNorm, but only on GPUs does it find that out by itself.
        forward = nn.SyncBatchNorm.forward
        nn.SyncBatchNorm.forward = nn.BatchNorm1d.forward  # type: ignore[method-assign]
        try:
            with in_place_of_the_world(self._group):
                yield
        finally:
            nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign]

    def close(self) -> None:
        """Forget the group."""
        group, self._group = self._group, None
        # After a failure the whole process group may be gone already.
        if group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(group)
