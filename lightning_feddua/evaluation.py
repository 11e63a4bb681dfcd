"""Validation and test of the global model, sharded over ranks by batches and exact for any number of ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from lightning_feddua.data.batch_transfer import BatchTransfer
from lightning_feddua.data.client_data import ClientData
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.log_capture import LogCapture, local_metrics
from lightning_feddua.table import Columns, Row, Table, exchange, gather_objects, means
from lightning_feddua.trainer_view import TrainerView

Stage = Literal["validation", "test"]
# Metrics with one of these in their name are worse the larger they are.
_LARGE_IS_WORSE = ("loss", "error", "perplexity")


class Evaluator:
    """Runs ``validation_step`` or ``test_step`` over a dataset.

    Batch k is the same samples whatever the world size, and rank ``k mod world_size`` takes it. What is logged from
    each batch comes back in batch order, so that means do not depend on the number of ranks; no sample counts twice.

    Args:
        fabric: devices, precision, the collective.
        module: the module, with the weights to evaluate in it.
        view: what the module finds at ``self.trainer``.
        transfer: brings a batch to the device.
    """

    def __init__(self, fabric: Fabric, module: LightningModule, view: TrainerView, transfer: BatchTransfer) -> None:
        self._fabric = fabric
        self._module = module
        self._view = view
        self._transfer = transfer
        self._capture = LogCapture(fabric.device)
        self._tables: dict[Stage, Table] = {}
        # Trainer sums up metrics in the default dtype of the step.
        self._dtype = np.float64 if fabric.strategy.precision.precision == "64-true" else np.float32

    def run(self, data: ClientData, batch_size: int, stage: Stage = "validation") -> dict[str, float]:
        """The metrics that the module logs on this data, each reduced as it asked for; a collective."""
        rank, world_size = self._fabric.global_rank, self._fabric.world_size
        batches = -(-len(data) // batch_size)
        table = self._tables.setdefault(stage, Table(self._fabric))
        with self._evaluating(stage):
            rows, last_row, metrics = self._run_batches(data, batch_size, range(rank, batches, world_size), stage)
            # One more row for each rank, for what is logged when the batches are done.
            rows[batches + rank] = last_row
            columns = exchange(self._fabric, table, rows, batches + world_size)
            return {**means(columns, self._dtype), **self._compute_together(metrics)}

    def run_alone(self, data: ClientData, batch_size: int) -> Row:
        """The validation metrics of this rank on its own data, as a row of a table; nothing is exchanged."""
        batches = -(-len(data) // batch_size)
        with local_metrics(self._module), self._evaluating("validation"):
            rows, rows[batches], metrics = self._run_batches(data, batch_size, range(batches), "validation")
            names = sorted({name for row in rows.values() for name in row})
            present = {name: [row[name] for row in rows.values() if name in row] for name in names}
            result: dict[str, tuple[Tensor, float]] = {}
            for name, cells in present.items():
                weights = [weight for _, weight in cells]
                total = sum(value.double() * weight for value, weight in cells)
                result[name] = (torch.as_tensor(total) / sum(weights), 1.0)
            for name, metric in metrics.items():
                result[name] = (torch.as_tensor(metric.compute()), 1.0)
                metric.reset()
            return result

    def _run_batches(
        self, data: ClientData, batch_size: int, batches: Iterable[int], stage: Stage
    ) -> tuple[dict[int, Row], Row, dict[str, Metric]]:
        """What is logged in each of these batches, after them, and as Metric objects."""
        capture = self._capture
        step = getattr(self._module, f"{stage}_step")
        takes_batch_idx = len(inspect.signature(step).parameters) > 1
        rows: dict[int, Row] = {}
        metrics: dict[str, Metric] = {}
        with capture.attached(self._module):
            self._hook(f"on_{stage}_start")
            self._hook(f"on_{stage}_epoch_start")
            for index in batches:
                positions = np.arange(index * batch_size, min((index + 1) * batch_size, len(data)))
                batch = self._transfer(data.batch(positions))
                capture.start()
                capture.start_batch(batch)
                self._hook(f"on_{stage}_batch_start", batch, index)
                with self._fabric.autocast():
                    output = step(batch, index) if takes_batch_idx else step(batch)
                self._hook(f"on_{stage}_batch_end", output, batch, index)
                rows[index] = capture.values()
                metrics.update(capture.metrics)
            capture.start()
            self._hook(f"on_{stage}_epoch_end")
            self._hook(f"on_{stage}_end")
            metrics.update(capture.metrics)
        return rows, capture.values(), metrics

    def _compute_together(self, metrics: dict[str, Metric]) -> dict[str, float]:
        """Metric objects, computed by all ranks at once, those without a batch included."""
        paths = {id(module): path for path, module in self._module.named_modules()}
        own = {}
        for name, metric in metrics.items():
            if id(metric) not in paths:
                raise ConfigurationError(
                    f"The metric logged as `{name}` is not an attribute of `{type(self._module).__name__}`.",
                    "Make it one in `__init__`, so that every rank can find it.",
                )
            own[name] = paths[id(metric)]
        everywhere = {name: path for part in gather_objects(self._fabric, own) for name, path in part.items()}
        results = {}
        for name in sorted(everywhere):
            results[name] = float(self._module.get_submodule(everywhere[name]).compute())  # type: ignore[operator]
        for path in set(everywhere.values()):
            self._module.get_submodule(path).reset()  # type: ignore[operator]
        return results

    @contextmanager
    def _evaluating(self, stage: Stage) -> Iterator[None]:
        """Evaluation mode, and each submodule's own mode again afterwards."""
        modes = [(module, module.training) for module in self._module.modules()]
        flag = "validating" if stage == "validation" else "testing"
        self._module.eval()
        setattr(self._view, flag, True)
        try:
            with torch.inference_mode():
                yield
        finally:
            setattr(self._view, flag, False)
            for module, training in modes:
                module.training = training

    def _hook(self, name: str, *args: Any) -> None:
        if is_overridden(name, self._module):
            getattr(self._module, name)(*args)


def client_statistics(columns: Columns) -> dict[str, float]:
    """Mean, standard deviation and the mean of the worst tenth, over clients, of each metric.

    Worst is largest for a metric with ``loss``, ``error`` or ``perplexity`` in its name, and smallest for any other.
    """
    results = {}
    for name, (values, weights) in columns.items():
        ordered = np.sort(values[weights > 0])
        tenth = -(-len(ordered) // 10)
        worst = ordered[-tenth:] if any(word in name.lower() for word in _LARGE_IS_WORSE) else ordered[:tenth]
        results[f"{name}/mean"] = float(ordered.mean())
        results[f"{name}/std"] = float(ordered.std())
        results[f"{name}/worst_decile"] = float(worst.mean())
    return results
