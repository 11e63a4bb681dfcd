"""Validation and test of the global model, sharded over ranks by batches and exact for any number of ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric

from lightning_feddua.data.batch_transfer import BatchTransfer
from lightning_feddua.data.client_data import ClientData
from lightning_feddua.log_capture import LogCapture
from lightning_feddua.parameters import scalar_dtype
from lightning_feddua.table import Table, gather_objects, means
from lightning_feddua.trainer_view import TrainerView

Stage = Literal["validation", "test"]


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
        self._tables: dict[str, Table] = {}

    def run(self, data: ClientData, batch_size: int, stage: Stage = "validation") -> dict[str, float]:
        """The metrics that the module logs on this data, each reduced as it asked for."""
        rank, world_size = self._fabric.global_rank, self._fabric.world_size
        batches = -(-len(data) // batch_size)
        table = self._tables.setdefault(stage, Table(self._fabric))
        table.start()
        capture = LogCapture(self._fabric.device)
        step = getattr(self._module, f"{stage}_step")
        takes_batch_idx = len(inspect.signature(step).parameters) > 1
        objects: dict[str, Metric] = {}
        with capture.attached(self._module), self._evaluating(stage):
            self._hook(f"on_{stage}_start")
            self._hook(f"on_{stage}_epoch_start")
            for index in range(rank, batches, world_size):
                positions = np.arange(index * batch_size, min((index + 1) * batch_size, len(data)))
                batch = self._transfer(data.batch(positions))
                capture.start()
                capture.start_batch(batch)
                self._hook(f"on_{stage}_batch_start", batch, index)
                with self._fabric.autocast():
                    output = step(batch, index) if takes_batch_idx else step(batch)
                self._hook(f"on_{stage}_batch_end", output, batch, index)
                table.add(index, capture.values())
                objects.update(capture.metrics)
            capture.start()
            self._hook(f"on_{stage}_epoch_end")
            self._hook(f"on_{stage}_end")
            # One more row for each rank, for what is logged when the batches are done.
            table.add(batches + rank, capture.values())
            objects.update(capture.metrics)
            dtype = scalar_dtype(self._fabric.device)
            window = torch.zeros(table.size(batches + world_size, dtype), dtype=dtype, device=self._fabric.device)
            table.write(window)
            self._fabric.all_reduce(window, reduce_op="sum")
            return {**means(table.read(window)), **self._compute(objects)}

    def _compute(self, objects: dict[str, Metric]) -> dict[str, float]:
        """Metric objects, computed by all ranks together, those among them that had no batch included."""
        names = {id(metric): path for path, metric in self._module.named_modules()}
        own = {name: names[id(metric)] for name, metric in objects.items()}
        paths = {name: path for part in gather_objects(self._fabric, own) for name, path in part.items()}
        results = {}
        for name in sorted(paths):
            metric = self._module.get_submodule(paths[name])
            assert isinstance(metric, Metric)
            results[name] = float(metric.compute())
            metric.reset()
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
