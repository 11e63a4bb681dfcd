"""What a module says with ``self.log``, kept without a device synchronisation until a client or a batch is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_feddua._private import set_sync_flags, sync_flags
from lightning_feddua.metric_names import LOOP_COLUMNS

Reduce = Callable[[Tensor, Tensor], Tensor]
# What `reduce_fx` may be, by the name it has here.
_KINDS: dict[Any, str] = {
    "mean": "mean", "avg": "mean", torch.mean: "mean",
    "sum": "sum", torch.sum: "sum",
    "max": "max", torch.max: "max", max: "max",
    "min": "min", torch.min: "min", min: "min",
}  # fmt: skip
_REDUCTIONS: dict[str, Reduce] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


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
        # How each logged number is reduced: mean, sum, max or min.
        self.kinds: dict[str, str] = {}
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
        if name in LOOP_COLUMNS:
            raise ValueError(f"`self.log({name!r}, ...)` takes a name that the loop itself logs. Choose another.")
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        if not isinstance(value, Tensor):
            if not isinstance(value, Number):
                raise ValueError(
                    f"`self.log({name!r}, ...)` was called with a `{type(value).__name__}`."
                    " Log a number, a tensor of one or a `Metric`; several of them with `self.log_dict`."
                )
            value = torch.as_tensor(value, device=self._device, dtype=torch.get_default_dtype())
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` was called with a tensor of shape {tuple(value.shape)}."
                " Log a single number."
            )
        # At least float32: sums in a shorter dtype would stall.
        dtype = torch.promote_types(value.dtype, torch.float32)
        value = value.detach().reshape(()).to(self._device, dtype)
        if reduce_fx not in _KINDS:
            raise ValueError(
                f"`self.log({name!r}, reduce_fx={reduce_fx!r})` is not supported in a federated run."
                " Use one of `mean`, `sum`, `max`, `min`."
            )
        kind = _KINDS[reduce_fx]
        weight = 1.0 if kind != "mean" else self._size_of_batch() if batch_size is None else batch_size
        self.accumulate(name, value, weight, kind)

    def accumulate(self, name: str, value: Tensor, weight: float, kind: str = "mean") -> None:
        """Add a value to what is known under a name: to the weighted mean, or to the ``sum``, ``max`` or ``min``."""
        known = self._values.get(name)
        self.kinds[name] = kind
        if kind != "mean":
            self._values[name] = value.clone() if known is None else _REDUCTIONS[kind](known, value)
            self._weights[name] = 1.0
        elif known is None:
            self._values[name] = value * weight
            self._weights[name] = weight
        else:
            self._values[name] = torch.add(known, value, alpha=weight)
            self._weights[name] += weight

    def values(self) -> dict[str, tuple[Tensor, float]]:
        """Each logged number, reduced over the steps, with the weight it has in a further mean."""
        return {name: (value / self._weights[name], self._weights[name]) for name, value in self._values.items()}

    def _size_of_batch(self) -> int:
        if self._batch_size is None:
            self._batch_size = 1 if self._batch is None else extract_batch_size(self._batch)
        return self._batch_size

    @contextmanager
    def attached(self, module: LightningModule) -> Iterator[None]:
        """Receive what the module, and LightningModules inside it, log."""
        modules = [m for m in module.modules() if isinstance(m, LightningModule)]
        before = [vars(m).get("log") for m in modules]
        for m in modules:
            m.log = self.log  # type: ignore[method-assign]
        try:
            yield
        finally:
            for m, log in zip(modules, before, strict=True):
                if log is None:
                    del m.log
                else:
                    m.log = log  # type: ignore[method-assign]


@contextmanager
def local_metrics(module: LightningModule) -> Iterator[None]:
    """Keep the module's torchmetrics from talking to other ranks, which may be in other clients."""
    metrics = [(m, sync_flags(m)) for m in module.modules() if isinstance(m, Metric)]
    for metric, _ in metrics:
        set_sync_flags(metric, (False, False))
    try:
        yield
    finally:
        for metric, before in metrics:
            set_sync_flags(metric, before)


def compute_alone(name: str, metric: Metric) -> Tensor:
    """The value on this rank of the metric logged under a name; also for one that is not a module's attribute."""
    before = sync_flags(metric)
    set_sync_flags(metric, (False, False))
    try:
        return single_number(name, metric.compute())
    finally:
        set_sync_flags(metric, before)


def single_number(name: str, value: Any) -> Tensor:
    """What the metric logged under a name has computed; one clear error for a matrix, or several values in a dict."""
    if not isinstance(value, Tensor | Number) or (isinstance(value, Tensor) and value.numel() != 1):
        raise ValueError(
            f"The metric logged as `{name}` computes no single number."
            " Call its `compute` yourself, and log single numbers of that."
        )
    return torch.as_tensor(value)
