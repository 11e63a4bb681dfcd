"""What a module says with ``self.log``, kept without a device synchronisation until a client or a batch is done."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from numbers import Number
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from lightning_feddua._private import last_batch_value, set_sync_flags, sync_flags
from lightning_feddua.host.log_options import MEAN_ONLY, LogOptions, LogTarget
from lightning_feddua.lightning_names import is_module
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

    A value counts with its batch size, as under Trainer, and there is one value per name for the round: ``on_step``,
    ``on_epoch``, ``prog_bar``, ``logger`` and ``sync_dist`` make no difference to it. A torchmetrics ``Metric`` is kept
    as an object. What the client's own Trainer would show of it while the client trains is in :meth:`logged_by_steps`.

    Args:
        device: where scalars are kept.
        by_steps: whether to keep the values of single steps and passes, too.
    """

    def __init__(self, device: torch.device, by_steps: bool = False) -> None:
        self._device = device
        self._by_steps = by_steps
        self.options: dict[str, LogOptions] = {}
        self.start()

    def start(self) -> None:
        """Forget everything logged."""
        self._values: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}
        # How each logged number is reduced: mean, sum, max or min.
        self.kinds: dict[str, str] = {}
        self.metrics: dict[str, Metric] = {}
        # The last value of each name; all values of this pass, with weights; those of the last pass that had any, as
        # one; and the names that were logged in this pass.
        self._last: dict[str, Tensor] = {}
        self._pass: dict[str, list[tuple[Tensor, float]]] = {}
        self._passed: dict[str, Tensor] = {}
        self._seen: set[str] = set()
        self.start_batch(None)

    def start_pass(self) -> None:
        """Begin another pass over the data."""
        self._passed |= self._values_of_pass()
        self._pass = {}
        self._seen = set()

    def _values_of_pass(self) -> dict[str, Tensor]:
        values = {name: _reduced(values, self.kinds[name]) for name, values in self._pass.items()}
        metrics = {
            name: one for name, one in self.metrics.items() if name in self._seen and self.options[name].on_epoch
        }
        return {**values, **{name: compute_alone(name, metric) for name, metric in metrics.items()}}

    def start_batch(self, batch: Any) -> None:
        """Take batch sizes from this batch from now on."""
        self._batch = batch
        self._batch_size: int | None = None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *args: Any,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Has the signature of ``LightningModule.log``."""
        if name in LOOP_COLUMNS:
            raise ValueError(f"`self.log({name!r}, ...)` takes a name that the loop itself logs. Choose another.")
        # Trainer's defaults: the steps of training log single values, everything else logs means.
        single = self._by_steps and self._batch is not None
        on_step, on_epoch = single if on_step is None else on_step, not single if on_epoch is None else on_epoch
        options = (on_step, on_epoch, prog_bar, logger is not False)
        if self.options.get(name) != options:
            self.options[name] = LogOptions(*options)
        self._seen.add(name)
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
        value = value.detach()
        if value.ndim > 0 or value.dtype is not torch.float32 or value.device != self._device:
            # At least float32: sums in a shorter dtype would stall.
            value = value.reshape(()).to(self._device, torch.promote_types(value.dtype, torch.float32))
        if reduce_fx not in _KINDS:
            raise ValueError(
                f"`self.log({name!r}, reduce_fx={reduce_fx!r})` is not supported in a federated run."
                " Use one of `mean`, `sum`, `max`, `min`."
            )
        kind = _KINDS[reduce_fx]
        weight = 1.0 if kind != "mean" else self._size_of_batch(on_epoch) if batch_size is None else batch_size
        self.accumulate(name, value, weight, kind)
        if self._by_steps:
            # A copy: what is logged may be a tensor that the module changes in place.
            self._last[name] = value = value.clone()
            if on_epoch:
                self._pass.setdefault(name, []).append((value, weight))

    def logged_by_steps(self, target: LogTarget) -> dict[str, Tensor]:
        """What Trainer would show to a target at this moment: values of the last step, and of the last whole pass."""
        in_step, found = self._batch is not None, dict[str, Tensor]()
        passed = self._passed if in_step else self._passed | self._values_of_pass()
        for name, options in self.options.items():
            metric = self.metrics.get(name)
            step = self._last.get(name) if metric is None else last_batch_value(metric)
            found |= options.named(target, name, step, passed.get(name), in_step and name in self._seen)
        return found

    def logged_over(self, target: LogTarget, values: Mapping[str, float]) -> dict[str, Tensor]:
        """What Trainer would show to a target at the end of a validation with these values."""
        found = dict[str, Tensor]()
        for name, value in values.items():
            options = self.options.get(name, MEAN_ONLY)
            found |= options.named(target, name, None, torch.tensor(value), newest_is_step=False)
        return found

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

    def _size_of_batch(self, needed: bool) -> int:
        """The size of the batch; 1 if Lightning cannot tell it and Trainer, which logs each step, would not ask."""
        if self._batch_size is None:
            try:
                self._batch_size = 1 if self._batch is None else extract_batch_size(self._batch)
            except MisconfigurationException:
                if needed:
                    raise
                return 1
        return self._batch_size

    @contextmanager
    def attached(self, module: LightningModule) -> Iterator[None]:
        """Receive what the module, and LightningModules inside it, log."""
        modules = [m for m in module.modules() if is_module(m)]
        before = [vars(m).get("log") for m in modules]
        self.options = {}
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


def _reduced(values: list[tuple[Tensor, float]], kind: str) -> Tensor:
    """One value for a pass, in the order of its steps."""
    if kind != "mean":
        return reduce(_REDUCTIONS[kind], [value for value, _ in values])
    return sum((value * weight for value, weight in values), torch.zeros(())) / sum(weight for _, weight in values)


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
