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
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from lightning_feddua.aggregation.collectives import gather_objects
from lightning_feddua.aggregation.metric_rows import Columns, Row, Table, exchange, means
from lightning_feddua.data.client_data import ClientData
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.batch_transfer import BatchTransfer
from lightning_feddua.host.log_capture import LogCapture, local_metrics, single_number
from lightning_feddua.host.trainer_view import TrainerView
from lightning_feddua.metric_names import large_is_worse
from lightning_feddua.randomness import Purpose, seed_generators

Stage = Literal["validation", "test"]


class Evaluator:
    """Runs ``validation_step`` or ``test_step`` over a dataset.

    Batch k is the same samples whatever the world size, and rank ``k mod world_size`` takes it. What is logged from
    each batch comes back in batch order, so that results do not depend on the number of ranks; no sample counts twice.
    A module that does something of its own when the batches are done (``on_validation_epoch_end``) sees all of them on
    every rank.

    Args:
        fabric: devices, precision, the collective.
        module: the module, with the weights to evaluate in it.
        view: what the module finds at ``self.trainer``.
        transfer: brings a batch to the device.
        seed: of everything random in a step.
    """

    def __init__(
        self, fabric: Fabric, module: LightningModule, view: TrainerView, transfer: BatchTransfer, seed: int = 0
    ) -> None:
        _check_signatures(module)
        self._fabric = fabric
        self._module = module
        self._view = view
        self._transfer = transfer
        self._seed = seed
        self._capture = LogCapture(fabric.device)
        self._tables: dict[Stage, Table] = {}
        # Trainer sums up metrics in the default dtype of the step.
        self._dtype = np.float64 if fabric.strategy.precision.precision == "64-true" else np.float32

    def run(self, data: ClientData, batch_size: int, stage: Stage = "validation") -> dict[str, float]:
        """The metrics that the module logs on this data, each reduced as it asked for; a collective."""
        rank, world_size = self._fabric.global_rank, self._fabric.world_size
        batches = -(-len(data) // batch_size)
        epoch_end = any(is_overridden(f"on_{stage}_{moment}", self._module) for moment in ("epoch_end", "end"))
        if world_size == 1 or epoch_end or batches < world_size:
            return self._run_alone(data, batch_size, stage)
        with local_metrics(self._module), self._evaluating(stage):
            rows, outside, metrics = self._run_batches(data, batch_size, range(rank, batches, world_size), stage)
        if rank == 0:
            rows[batches] = outside
        table = self._tables.setdefault(stage, Table(self._fabric))
        columns = exchange(self._fabric, table, rows, batches + 1)
        return {**_reduce(columns, self._dtype), **self._compute_together(metrics)}

    def run_client(self, data: ClientData, batch_size: int) -> Row:
        """The validation metrics on one client's data, as a row of a table; nothing is exchanged."""
        metrics = self._run_alone(data, batch_size, "validation")
        return {name: (torch.tensor(value, dtype=torch.float64), 1.0) for name, value in metrics.items()}

    def _run_alone(self, data: ClientData, batch_size: int, stage: Stage) -> dict[str, float]:
        """All batches on this rank, without any exchange."""
        batches = -(-len(data) // batch_size)
        with local_metrics(self._module), self._evaluating(stage):
            rows, rows[batches], metrics = self._run_batches(data, batch_size, range(batches), stage)
            results = self._reduced(rows, metrics)
            # After all values: metrics of one collection may share a state.
            for metric in metrics.values():
                metric.reset()
            return results

    def _reduced(self, rows: dict[int, Row], metrics: dict[str, Metric]) -> dict[str, float]:
        """What this rank alone has logged, in rows and as Metric objects."""
        columns: Columns = {}
        count = max(rows, default=0) + 1
        for index, row in rows.items():
            for name, (value, weight) in row.items():
                values, weights = columns.setdefault(name, (np.zeros(count), np.zeros(count)))
                values[index], weights[index] = value.item(), weight
        computed = {name: float(single_number(name, metric.compute())) for name, metric in metrics.items()}
        return {**_reduce(columns, self._dtype), **computed}

    def _run_batches(
        self, data: ClientData, batch_size: int, batches: Iterable[int], stage: Stage
    ) -> tuple[dict[int, Row], Row, dict[str, Metric]]:
        """What is logged in each of these batches, before and after them, and as Metric objects."""
        capture, device = self._capture, self._fabric.device
        step = getattr(self._module, f"{stage}_step")
        takes_batch_idx = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        rows: dict[int, Row] = {}
        metrics: dict[str, Metric] = {}
        with capture.attached(self._module):
            capture.start()
            self._hook(f"on_{stage}_start")
            self._hook(f"on_{stage}_epoch_start")
            outside = dict(_logged(capture))
            for index in batches:
                positions = np.arange(index * batch_size, min((index + 1) * batch_size, len(data)))
                seed_generators(self._seed, self._view.current_round, index, Purpose.EVALUATION, device)
                batch = self._transfer(data.batch(positions))
                capture.start()
                capture.start_batch(batch)
                self._hook(f"on_{stage}_batch_start", batch, index)
                with self._fabric.autocast():
                    output = step(batch, index) if takes_batch_idx else step(batch)
                self._hook(f"on_{stage}_batch_end", output, batch, index)
                rows[index] = _logged(capture)
                metrics.update(capture.metrics)
            capture.start()
            self._view.logged_since = lambda: {
                name: torch.tensor(value) for name, value in self._reduced(rows, metrics).items()
            }
            self._hook(f"on_{stage}_epoch_end")
            self._hook(f"on_{stage}_end")
            metrics.update(capture.metrics)
        return rows, {**outside, **_logged(capture)}, metrics

    def _compute_together(self, metrics: dict[str, Metric]) -> dict[str, float]:
        """Metric objects, computed by all ranks at once."""
        paths = {id(module): path for path, module in self._module.named_modules()}
        own = {name: paths.get(id(metric)) for name, metric in metrics.items()}
        everywhere = {name: path for part in gather_objects(self._fabric, own) for name, path in part.items()}
        for name, path in everywhere.items():
            if path is None:
                raise ConfigurationError(
                    f"The metric logged as `{name}` is not an attribute of `{type(self._module).__name__}`.",
                    "Make it one in `__init__`, so that every rank can find it.",
                )
        results = {}
        for name in sorted(everywhere):
            value = self._module.get_submodule(str(everywhere[name])).compute()  # type: ignore[operator]
            results[name] = float(single_number(name, value))
        for path in set(everywhere.values()):
            self._module.get_submodule(str(path)).reset()  # type: ignore[operator]
        return results

    @contextmanager
    def _evaluating(self, stage: Stage) -> Iterator[None]:
        """Evaluation mode, and each submodule's own mode again afterwards."""
        modes = [(module, module.training) for module in self._module.modules()]
        flag = "validating" if stage == "validation" else "testing"
        setattr(self._view, flag, True)
        if is_overridden(f"on_{stage}_model_eval", self._module):
            self._hook(f"on_{stage}_model_eval")
        else:
            self._module.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self._view.logged_since = dict
            if is_overridden(f"on_{stage}_model_train", self._module):
                self._hook(f"on_{stage}_model_train")
            else:
                for module, training in modes:
                    module.training = training
            setattr(self._view, flag, False)

    def _hook(self, name: str, *args: Any) -> None:
        if is_overridden(name, self._module):
            getattr(self._module, name)(*args)


def _check_signatures(module: LightningModule) -> None:
    """One clear error for a step or a hook that expects several datasets."""
    for stage in ("validation", "test"):
        for name in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
            argument = inspect.signature(getattr(module, name)).parameters.get("dataloader_idx")
            if argument is not None and argument.default is argument.empty:
                raise ConfigurationError(
                    f"`{type(module).__name__}.{name}` needs a `dataloader_idx`, and there is one dataset for"
                    f" {stage} alone.",
                    "Write `dataloader_idx=0`, or remove it.",
                )


def _logged(capture: LogCapture) -> Row:
    """What was logged, with the reduction as part of the name, so that every rank knows it."""
    return {f"{capture.kinds[name]}:{name}": cell for name, cell in capture.values().items()}


def _reduce(columns: Columns, dtype: type[np.floating[Any]]) -> dict[str, float]:
    """Each logged name reduced over all rows as it asked for, in row order."""
    results = {}
    for key, (values, weights) in columns.items():
        kind, _, name = key.partition(":")
        present = values[weights > 0]
        if kind == "mean":
            results.update(means({name: (values, weights)}, dtype))
        elif len(present):
            results[name] = float(getattr(present, kind)())
    return results


def client_statistics(columns: Columns) -> dict[str, float]:
    """Mean, standard deviation and the mean of the worst tenth, over clients, of each metric.

    Worst is largest for a metric whose name has a word such as ``loss``, ``error`` or ``mse``, and smallest for any
    other.
    """
    results = {}
    for name, (values, weights) in columns.items():
        ordered = np.sort(values[weights > 0])
        tenth = -(-len(ordered) // 10)
        worst = ordered[-tenth:] if large_is_worse(name) else ordered[:tenth]
        results[f"{name}/mean"] = float(ordered.mean())
        results[f"{name}/std"] = float(ordered.std())
        results[f"{name}/worst_decile"] = float(worst.mean())
    return results
