"""What a module says with ``self.log``, kept without a device synchronisation until a client or a batch is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    torch.sum: torch.add,
    "max": torch.maximum,
    torch.max: torch.maximum,
    "min": torch.minimum,
    torch.min: torch.minimum,
}
_MEANS = ("mean", "avg", torch.mean)


class LogCapture:
    """Stands in for ``LightningModule.log`` and reduces what is logged over the steps of one client, or one batch.

    A value counts with its batch size, as under Trainer, and there is one value a name: ``on_step``, ``on_epoch``,
    ``prog_bar``, ``logger`` and ``sync_dist`` make no difference. A torchmetrics ``Metric`` is kept as an object.

    Args:
        device: where scalars are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start()

    def start(self) -> None:
        """Forget everything logged."""
        self._values: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}
        self._extremes: set[str] = set()
        self.metrics: dict[str, Metric] = {}
        self.start_batch(None)

    def start_batch(self, batch: Any) -> None:
        """Take batch sizes from this batch from now on."""
        self._batch = batch
        self._batch_size: int | None = None

    def log(
        self,
        name: str,
        value: Any,
        *args: Any,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Has the signature of ``LightningModule.log``."""
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, device=self._device, dtype=torch.get_default_dtype())
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` was called with a tensor of shape {tuple(value.shape)}."
                " Log a single number."
            )
        value = value.detach().reshape(())
        if not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        if reduce_fx in _MEANS:
            weight = self._size_of_batch() if batch_size is None else batch_size
            if name in self._values:
                self._values[name] = torch.add(self._values[name], value, alpha=weight)
                self._weights[name] += weight
            else:
                self._values[name] = value * weight
                self._weights[name] = weight
        elif reduce_fx in _REDUCTIONS:
            known = self._values.get(name)
            self._values[name] = value.clone() if known is None else _REDUCTIONS[reduce_fx](known, value)
            self._extremes.add(name)
        else:
            raise ValueError(
                f"`self.log({name!r}, reduce_fx={reduce_fx!r})` is not supported in a federated run."
                " Use one of `mean`, `sum`, `max`, `min`."
            )

    def values(self) -> dict[str, tuple[Tensor, float]]:
        """Each logged number, reduced over the steps, with the weight it has in a further mean."""
        return {
            name: (value, 1.0) if name in self._extremes else (value / self._weights[name], self._weights[name])
            for name, value in self._values.items()
        }

    def _size_of_batch(self) -> int:
        if self._batch_size is None:
            self._batch_size = 1 if self._batch is None else extract_batch_size(self._batch)
        return self._batch_size

    @contextmanager
    def attached(self, module: LightningModule) -> Iterator[None]:
        """Receive what the module, and LightningModules inside it, log."""
        modules = [m for m in module.modules() if isinstance(m, LightningModule)]
        for m in modules:
            m.log = self.log  # type: ignore[method-assign]
        try:
            yield
        finally:
            for m in modules:
                del m.log


@contextmanager
def local_metrics(module: LightningModule) -> Iterator[None]:
    """Keep the module's torchmetrics from talking to other ranks, which may be in other clients."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    for metric in metrics:
        metric._to_sync = metric.sync_on_compute = False
    try:
        yield
    finally:
        for metric in metrics:
            metric._to_sync = metric.sync_on_compute = True
