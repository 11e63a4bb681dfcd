"""From a batch as it was indexed to a batch on the device, through the user's hooks."""

from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lightning_feddua._private import tree_map
from lightning_feddua.lightning_names import is_overridden


class BatchTransfer:
    """Applies ``on_before_batch_transfer``, ``transfer_batch_to_device`` and ``on_after_batch_transfer``.

    As under Trainer, a hook of the data module goes before the module's, and hooks that nobody overrides cost nothing.

    Args:
        fabric: the device and the precision.
        module: the module, for its hooks.
        datamodule: the data module, for its hooks.
        channels_last: whether images get the memory format that many convolutions are faster with.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: LightningModule,
        datamodule: LightningDataModule,
        channels_last: bool = False,
    ) -> None:
        self._device = fabric.device
        self._before = _hook("on_before_batch_transfer", module, datamodule)
        self._move = _hook("transfer_batch_to_device", module, datamodule)
        self._after = _hook("on_after_batch_transfer", module, datamodule)
        precision = fabric.strategy.precision
        self._channels_last = channels_last
        # Fabric's mixed precision would round inputs to 16 bits; Trainer's leaves them to autocast.
        self._convert = None if isinstance(precision, MixedPrecision) else precision.convert_input

    @property
    def has_hooks(self) -> bool:
        """Whether the user's code sees the batches on their way."""
        return not (self._before is None and self._move is None and self._after is None)

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """The batch on the device.

        Args:
            batch: the batch.
            dataloader_idx: which of several datasets it comes from.
        """
        if self._before is not None:
            batch = self._before(batch, dataloader_idx)
        if self._move is not None:
            batch = self._move(batch, self._device, dataloader_idx)
        elif self._device.type != "cpu":
            batch = move_data_to_device(batch, self._device)
        if self._convert is not None:
            batch = self._convert(batch)
        if self._after is not None:
            batch = self._after(batch, dataloader_idx)
            # What the hook made (normalised images, say) may not be in the run's precision yet.
            batch = batch if self._convert is None else self._convert(batch)
        return tree_map(_channels_last, batch) if self._channels_last else batch


def _channels_last(leaf: Any) -> Any:
    is_images = isinstance(leaf, Tensor) and leaf.dim() == 4
    return leaf.contiguous(memory_format=torch.channels_last) if is_images else leaf


def _hook(name: str, module: LightningModule, datamodule: LightningDataModule) -> Any:
    for owner in (datamodule, module):
        if is_overridden(name, owner):
            return getattr(owner, name)
    return None
