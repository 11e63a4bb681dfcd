"""Validation and test of the global model, sharded over ranks by batches and exact for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from torchmetrics import Metric

from lightning_feddua.aggregation.collectives import compute_together, gather_objects
from lightning_feddua.aggregation.metric_rows import Columns, Row, Table, exchange, means
from lightning_feddua.data.evaluation_data import EvaluationSet, Stage
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.batch_transfer import BatchTransfer
from lightning_feddua.host.buffers import ModuleBuffers
from lightning_feddua.host.evaluation_steps import EvaluationSteps, LoaderLogCapture
from lightning_feddua.host.hidden.snapshot import Snapshot
from lightning_feddua.host.lightning_callbacks import LightningCallbacks
from lightning_feddua.host.log_capture import LogCapture, compute_alone, local_metrics, single_number
from lightning_feddua.host.log_options import LogTarget, nothing_logged
from lightning_feddua.host.trainer.view import TrainerView
from lightning_feddua.host.world_of_one import WorldOfOne
from lightning_feddua.lightning_names import is_overridden
from lightning_feddua.randomness import Purpose, seed_generators

# Attributes of the view that tell a module what is going on.
_FLAGS = {"validation": "validating", "test": "testing", "predict": "predicting"}
# The ends of names of hooks that are called for each batch, or when all are done.
_COUNTING = ("batch_start", "batch_end", "epoch_end", "end")


class Evaluator:
    """Runs ``validation_step``, ``test_step`` or ``predict_step`` over one dataset or several.

    Batch k is the same samples whatever the world size, and rank ``k mod world_size`` takes it. What is logged from
    each batch comes back in batch order, so that results do not depend on the number of ranks; no sample counts twice.
    A module or a callback with a hook of its own for each batch or for their end (``on_validation_batch_end``,
    ``on_validation_epoch_end``) sees all of them on every rank, and so do all modules where a loader gives the
    batches. As under Trainer, names that are logged for one of several datasets end in ``/dataloader_idx_0`` and so on.

    Args:
        fabric: devices, precision, the collective.
        module: the module, with the weights to evaluate in it.
        view: what the module finds at ``self.trainer``.
        transfer: brings a batch to the device.
        world_of_one: for collectives of the module's own.
        seed: of everything random in a step.
        callbacks: Lightning's, which are called before the module's hooks.
        snapshot: remembers what the module keeps in Python.
        buffers: what the module's buffers should hold.
        limit: how many batches are used, or which fraction of them if a float; None for all.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: LightningModule,
        view: TrainerView,
        transfer: BatchTransfer,
        world_of_one: WorldOfOne,
        callbacks: LightningCallbacks,
        snapshot: Callable[[], Snapshot],
        buffers: ModuleBuffers,
        seed: int = 0,
        limit: int | float | None = None,
    ) -> None:
        self._fabric = fabric
        self.module = module
        self._view = view
        self._transfer = transfer
        self._world_of_one = world_of_one
        self._seed = seed
        self._callbacks = callbacks
        self.limit = limit
        # At most so many, in a check before the first round.
        self.most: int | None = None
        self._capture = LoaderLogCapture(fabric.device)
        self._tables: dict[Stage, Table] = {}
        self._snapshot = snapshot
        self._buffers = buffers
        # Stages in which the module keeps something of each batch, which every rank has to see.
        self._keeps: set[Stage] = set()
        # Metric objects of several datasets, whose values are known.
        self._spent: list[Metric] = []
        # Trainer sums up metrics in the default dtype of the step.
        self._dtype = np.float64 if fabric.strategy.precision.precision == "64-true" else np.float32

    def run(self, sets: Sequence[EvaluationSet], stage: Stage = "validation") -> dict[str, float]:
        """The metrics that the module logs on these datasets, each reduced as it asked for; a collective."""
        sets = self._limited(sets)
        steps = EvaluationSteps(self.module, stage, len(sets))
        batches = self._shared_batches(sets, stage)
        if batches is None or stage in self._keeps:
            return self._run_alone(sets, steps)
        before = self._snapshot()
        with local_metrics(self.module), self.evaluating(stage):
            rows, outside, metrics = self._run_batches(sets, steps, self._fabric.world_size)
        if self._fabric.global_rank == 0:
            rows[batches] = outside
        table = self._tables.setdefault(stage, Table(self._fabric))
        columns = exchange(self._fabric, table, rows, batches + 1)
        everywhere, keeps = self._agree(metrics, before)
        if keeps:
            # It would be different on each rank.
            before.restore(deep=True)
            self._buffers.restore()
            self._keeps.add(stage)
            return self._run_alone(sets, steps)
        return {**_reduce(columns, self._dtype), **self._compute_together(everywhere)}

    def _limited(self, sets: Sequence[EvaluationSet]) -> list[EvaluationSet]:
        """No more batches than asked for."""
        return [one.limited(self.limit, self.most) for one in sets]

    def run_client(self, data: EvaluationSet) -> Row:
        """The validation metrics on one client's data, as a row of a table; nothing is exchanged."""
        metrics = self._run_alone(self._limited([data]), EvaluationSteps(self.module, "validation", 1))
        return {name: (torch.tensor(value, dtype=torch.float64), 1.0) for name, value in metrics.items()}

    def sees_all(self, stage: Stage) -> bool:
        """Whether a callback or the module has a hook in which it can tell how many batches this rank has taken."""
        return any(self._callbacks.defines(f"on_{stage}_{moment}") for moment in _COUNTING)

    def _shared_batches(self, sets: Sequence[EvaluationSet], stage: Stage) -> int | None:
        """How many batches ranks share among them; None if each has to see all of them."""
        world_size, counts = self._fabric.world_size, [one.count for one in sets]
        known = [count for count in counts if count is not None]
        # A Metric's value for the first dataset is computed before the second one.
        in_turn = len(sets) > 1 and any(isinstance(part, Metric) for part in self.module.modules())
        alone = (
            world_size == 1 or self.sees_all(stage) or in_turn or len(known) < len(counts) or sum(known) < world_size
        )
        return None if alone else sum(known)

    def _run_alone(self, sets: Sequence[EvaluationSet], steps: EvaluationSteps) -> dict[str, float]:
        """All batches on this rank, without any exchange."""
        with local_metrics(self.module), self.evaluating(steps.stage):
            rows, outside, metrics = self._run_batches(sets, steps)
            results = self._reduced({**rows, max(rows, default=-1) + 1: outside}, metrics)
            # After all values: metrics of one collection may share a state.
            for metric in (*metrics.values(), *self._spent):
                metric.reset()
            self._spent.clear()
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

    def _shown(self, target: LogTarget, rows: dict[int, Row], outside: Row, metrics: dict[str, Metric]) -> Any:
        """What a target is shown of all this and of what hooks at the end log, also under names of the history."""
        capture, run = self._capture, self._view.run
        rows = {**rows, max(rows, default=-1) + 1: {**outside, **_logged(capture)}}
        found = capture.logged_over(target, self._reduced(rows, {**metrics, **capture.metrics}))
        return found if run is None else {**found, **run.columns.as_columns(found)}

    def _run_batches(
        self, sets: Sequence[EvaluationSet], steps: EvaluationSteps, ranks: int = 1
    ) -> tuple[dict[int, Row], Row, dict[str, Metric]]:
        """What is logged in each of this rank's batches, before and after them, and as Metric objects."""
        capture, stage = self._capture, steps.stage
        rows: dict[int, Row] = {}
        metrics: dict[str, Metric] = {}
        present = 0
        with capture.attached(self.module):
            capture.start_run()
            capture.start()
            self.hook(f"on_{stage}_start")
            self.hook(f"on_{stage}_epoch_start")
            outside = dict(_logged(capture))
            for place, dataloader_idx, index, batch in self.batches(sets, ranks):
                if dataloader_idx != present:
                    outside.update(self._computed(metrics))
                    metrics, present = {}, dataloader_idx
                capture.dataloader_idx = dataloader_idx if len(sets) > 1 else None
                capture.start()
                capture.start_batch(batch)
                self.hook(f"on_{stage}_batch_start", *steps.arguments(batch, index, dataloader_idx))
                with self._fabric.autocast():
                    output = steps.step(batch, index, dataloader_idx)
                self.hook(f"on_{stage}_batch_end", output, *steps.arguments(batch, index, dataloader_idx))
                rows[place] = _logged(capture)
                metrics.update(capture.metrics)
            if len(sets) > 1:
                outside.update(self._computed(metrics))
                metrics = {}
            capture.dataloader_idx = None
            capture.start()
            self._view.logged_since = lambda target: self._shown(target, rows, outside, metrics)
            self.hook(f"on_{stage}_epoch_end")
            self.hook(f"on_{stage}_end")
            metrics.update(capture.metrics)
        return rows, {**outside, **_logged(capture)}, metrics

    def batches(self, sets: Sequence[EvaluationSet], ranks: int = 1) -> Iterator[tuple[int, int, int, Any]]:
        """This rank's batches: their place among those of all datasets, the dataset, the place in it, and the batch."""
        place = 0
        for dataloader_idx, one in enumerate(sets):
            first = place

            def mine(index: int, first: int = first) -> bool:
                return (first + index) % ranks == self._fabric.global_rank % ranks

            def seed(index: int, dataloader_idx: int = dataloader_idx) -> None:
                index |= dataloader_idx << 20
                seed_generators(self._seed, self._view.current_round, index, Purpose.EVALUATION, self._fabric.device)

            for index, batch in one.read(mine, seed):
                place = first + index
                yield place, dataloader_idx, index, self._transfer(batch, dataloader_idx)
            place = first + one.count if one.count is not None else place + 1

    def _computed(self, metrics: dict[str, Metric]) -> Row:
        """The values of Metric objects at the end of one of several datasets."""
        self._spent += metrics.values()
        return {f"mean:{name}": (compute_alone(name, metric), 1.0) for name, metric in metrics.items()}

    def _agree(self, metrics: dict[str, Metric], before: Snapshot) -> tuple[dict[str, str | None], bool]:
        """The paths of Metric objects that any rank has logged, and whether one keeps something else; a collective."""
        paths = {id(module): path for path, module in self.module.named_modules()}
        own = {name: paths.get(id(metric)) for name, metric in metrics.items()}
        logged = tuple(f"self.{path}." for path in own.values())
        keeps = any(not label.startswith(logged) for label in before.changes()) or bool(self._buffers.changed())
        told = gather_objects(self._fabric, (own, keeps))
        return {name: path for part, _ in told for name, path in part.items()}, any(keeps for _, keeps in told)

    def _compute_together(self, everywhere: dict[str, str | None]) -> dict[str, float]:
        """Metric objects, computed by all ranks at once."""
        for name, path in everywhere.items():
            if path is None:
                raise ConfigurationError(
                    f"The metric logged as `{name}` is not an attribute of `{type(self.module).__name__}`.",
                    "Make it one in `__init__`, so that every rank can find it.",
                )
        results = {}
        for name in sorted(everywhere):
            metric: Any = self.module.get_submodule(str(everywhere[name]))
            value = compute_together(self._fabric, metric)
            results[name] = float(single_number(name, value))
        for path in set(everywhere.values()):
            self.module.get_submodule(str(path)).reset()  # type: ignore[operator]
        return results

    @contextmanager
    def evaluating(self, stage: Stage) -> Iterator[None]:
        """Evaluation mode, and each submodule's own mode again afterwards."""
        modes = [(module, module.training) for module in self.module.modules()]
        setattr(self._view, _FLAGS[stage], True)
        if is_overridden(f"on_{stage}_model_eval", self.module):
            self.hook(f"on_{stage}_model_eval")
        else:
            self.module.eval()
        try:
            with torch.inference_mode(), self._world_of_one.entered():
                yield
        finally:
            self._view.logged_since = nothing_logged
            if is_overridden(f"on_{stage}_model_train", self.module):
                self.hook(f"on_{stage}_model_train")
            else:
                for module, training in modes:
                    module.training = training
            setattr(self._view, _FLAGS[stage], False)

    def hook(self, name: str, *args: Any) -> None:
        """Call a hook of Lightning's callbacks and of the module, where any has one of its own."""
        if self._callbacks.defines(name):
            self._callbacks.hook(name, *args)


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
