"""The devices and ranks that a module sees: those of a Trainer on one device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning import LightningModule
from lightning.fabric import Fabric

from lightning_feddua.lightning_names import package_of


class TrainerDevices:
    """A world of one, so that nothing in a client depends on the number of ranks.

    While a client trains, its rank is the first. Outside of clients, ranks have their own numbers, so that a module can
    write a file on one of them alone.
    """

    _fabric: Fabric
    lightning_module: LightningModule
    in_client: bool

    world_size = num_devices = num_nodes = 1
    distributed_sampler_kwargs = None

    @property
    def global_rank(self) -> int:
        """The number of this rank; 0 while a client trains."""
        return 0 if self.in_client else self._fabric.global_rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node; 0 while a client trains."""
        return 0 if self.in_client else self._fabric.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this node; 0 while a client trains."""
        return 0 if self.in_client else self._fabric.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank, which it is for each client that trains."""
        return self.global_rank == 0

    @property
    def device_ids(self) -> list[int]:
        """The number of this rank's device."""
        return [self._fabric.device.index or 0]

    @property
    def accelerator(self) -> Any:
        """The kind of device, as an object of the module's own package if that has the same kind."""
        own = self._fabric.accelerator
        accelerators = import_module(f"{package_of(self.lightning_module)}.accelerators")
        kind = getattr(accelerators, type(own).__name__, None)
        return own if kind is None else kind()

    @property
    def precision(self) -> Any:
        """Such as ``"32-true"``."""
        return self._fabric.strategy.precision.precision

    @property
    def scaler(self) -> Any:
        """The gradient scaler of 16-mixed precision, or None."""
        return getattr(self._fabric.strategy.precision, "scaler", None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank of each node, or for the client that trains."""
        if self.local_rank == 0:
            print(*args, **kwargs)
