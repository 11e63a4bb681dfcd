"""What an unmodified LightningModule finds at ``self.trainer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric import Fabric
from torch.optim import Optimizer

from lightning_feddua._private import TRAINER_RESULTS, trainer_of
from lightning_feddua.data.streams import ENDLESS
from lightning_feddua.errors import UnequalClientsError
from lightning_feddua.host.log_options import nothing_logged
from lightning_feddua.host.trainer.callbacks import TrainerCallbacks
from lightning_feddua.host.trainer.devices import TrainerDevices
from lightning_feddua.host.trainer.loaders import TrainerLoaders
from lightning_feddua.host.trainer.metrics import TrainerMetrics
from lightning_feddua.host.trainer.quiet_logger import QuietLogger
from lightning_feddua.host.trainer.refusals import not_available
from lightning_feddua.host.trainer.stages import TrainerStages
from lightning_feddua.host.trainer.strategy import StrategyView
from lightning_feddua.lightning_names import package_of

if TYPE_CHECKING:
    from lightning_feddua.engines.base import LocalWork
    from lightning_feddua.host.optimizers import LocalOptimizers
    from lightning_feddua.run import Run


class TrainerView(TrainerStages, TrainerLoaders, TrainerMetrics, TrainerDevices, TrainerCallbacks):
    """Answers for the Trainer that a LightningModule was written for.

    Counters have local meaning: ``current_epoch`` and ``global_step`` count the passes and optimizer steps of the
    client in training, from 0 in each round, and are the round's number outside of clients, as in validation;
    ``max_epochs``, ``max_steps`` and ``estimated_stepping_batches`` are those of one client in one round.
    ``current_round`` and ``max_rounds`` tell where the federated run is.

    Every public name of Trainer is here, with the value that it would have in a fit of the client alone on one device,
    or is refused in one clear sentence.

    Args:
        fabric: answers for ranks and devices.
        module: the module in training.
        function: what the loop was called for: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
    """

    barebones = False
    fast_dev_run: bool | int = False
    accumulate_grad_batches = 1
    gradient_clip_algorithm: Any = None
    overfit_batches = 0.0
    log_every_n_steps = 50
    check_val_every_n_epoch: int | None = 1
    val_check_interval: int | float | None = 1.0
    reload_dataloaders_every_n_epochs = 0
    enable_autolog_hparams = True
    min_epochs: int | None = 0
    min_steps: int | None = None
    ckpt_path: str | None = None

    def __init__(self, fabric: Fabric, module: LightningModule, function: str = "fit") -> None:
        TrainerStages.__init__(self, module, function)
        TrainerLoaders.__init__(self)
        TrainerMetrics.__init__(self)
        self._fabric = fabric
        self.lightning_module = self.model = module
        # Whether a client trains right now.
        self.in_client = False
        self.strategy = StrategyView(self)
        self.precision_plugin = self.strategy.precision_plugin
        self.profiler = import_module(f"{package_of(module)}.profilers").PassThroughProfiler()
        self.local_optimizers: LocalOptimizers | None = None
        self.datamodule: Any = None
        self.callbacks = []
        # The run in progress, once its rounds have begun.
        self.run: Run | None = None
        self.gradient_clip_val: float | None = None
        self._quiet = False
        self.set_folder(".")
        self.received: Callable[[], bool] = bool
        self.start_round(0)
        self.max_rounds = 0
        self._work: LocalWork | None = None
        self._client_size: int | Callable[[], int] = 0
        # The number of the present minibatch in its pass.
        self.batch_idx: int | None = None
        # Whether it is the last of its pass; None where that follows from the client's size.
        self.stream_ends: bool | None = None

    def start_round(self, round: int) -> None:
        """Begin with a round; outside of clients, all counters are its number."""
        self.current_round = self.global_step = round
        self._epoch: int | None = round

    @property
    def current_epoch(self) -> int:
        """The client's current pass over its data; outside of clients, the round."""
        if self._epoch is None:
            raise UnequalClientsError(
                "`self.current_epoch` differs between the clients of one vectorized step. Use `engine='sequential'`."
            )
        return self._epoch

    @current_epoch.setter
    def current_epoch(self, epoch: int | None) -> None:
        self._epoch = epoch

    def stop_client(self) -> None:
        """Counters as they are outside of clients."""
        self.in_client = False
        self.client_data = self.batch_idx = self.stream_ends = None
        self.logged_since = nothing_logged
        self.current_epoch = self.global_step = self.current_round

    def start_client(self, work: LocalWork, size: int | Callable[[], int]) -> None:
        """Counters for a client with this many samples, before its first step.

        Args:
            work: how much the client does.
            size: its number of samples; a function where it costs something to find out, called when a module asks.
        """
        self.current_epoch = self.global_step = 0
        self._work, self._client_size = work, size
        self.batch_size = work.batch_size

    @property
    def max_steps(self) -> int:
        """Optimizer steps of one client in one round; -1 where nobody knows, as of passes over an endless stream."""
        if self._work is None or (self._work.steps is None and self.num_training_batches == math.inf):
            return -1
        return self._work.steps if self._work.steps is not None else self._work.optimizer_steps(self._size)

    @property
    def num_training_batches(self) -> int | float:
        """Minibatches in one pass over the client's data; infinity for a stream that does not tell."""
        length = 0 if self._work is None else self._work.pass_length(self._size)
        return math.inf if length >= ENDLESS else length

    @property
    def max_epochs(self) -> int | None:
        """Passes of one client in one round, the last of which may be incomplete; -1 where nobody knows."""
        if self._work is None or self._work.epochs is not None:
            return None if self._work is None else self._work.epochs
        length = self.num_training_batches
        return -1 if length == math.inf else math.ceil(self._work.batches(self._size) / length)

    @property
    def _size(self) -> int:
        return self._client_size() if callable(self._client_size) else self._client_size

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of one client in one round."""
        return self.max_steps

    @property
    def optimizers(self) -> list[Optimizer]:
        """The module's own optimizers."""
        return [] if self.local_optimizers is None else self.local_optimizers.optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The module's own learning-rate schedulers."""
        return [] if self.local_optimizers is None else self.local_optimizers.schedulers

    @property
    def is_last_batch(self) -> bool:
        """Whether the present minibatch is the last of the client's pass over its data."""
        if self._work is None or self.batch_idx is None:
            return False
        if self.stream_ends is not None:
            return self.stream_ends
        if self._work.steps is None or self._size <= self._work.batch_size:
            return self.batch_idx + 1 >= self.num_training_batches
        # A pass begins with the first minibatch that starts in it; the minibatch after the last starts in the next.
        first = -(-self.current_epoch * self._size // self._work.batch_size)
        return (first + self.batch_idx + 1) * self._work.batch_size // self._size > self.current_epoch

    @property
    def val_check_batch(self) -> int | float:
        """Clients do not validate: the length of a pass, as under Trainer by default."""
        return self.num_training_batches

    @property
    def received_sigterm(self) -> bool:
        """Whether the run was asked to end, which it does after the round."""
        return self.received()

    def set_folder(self, folder: str, log_dir: str | None = None) -> None:
        """Take the run's folder, and the one of its first logger if it has any."""
        self.default_root_dir = folder
        self.log_dir = folder if log_dir is None else log_dir
        self._quiet_logger = QuietLogger(folder)

    @property
    def loggers(self) -> list[Any]:
        """The run's loggers; where it has none, one that keeps quiet."""
        return [self._quiet_logger] if self._quiet else self._fabric.loggers or [self._quiet_logger]

    @contextmanager
    def without_loggers(self) -> Iterator[None]:
        """Around steps that are no part of the run: what they log themselves goes nowhere."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    @property
    def logger(self) -> Any:
        """The run's first logger."""
        return self.loggers[0]

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """New tensors are made on the run's device and in its precision."""
        return self._fabric.init_module(empty_init)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save the module as it is now, for ``load_from_checkpoint``; nothing resumes a run from it.

        In a client it holds the client's weights; in a validation those that are validated, which are the average of
        the last two iterates for rules with an adaptive step; else the global weights.
        """
        from lightning_feddua.checkpoints.state import module_checkpoint

        checkpoint = module_checkpoint(self.lightning_module, self.current_epoch, self.global_step)
        if self.is_global_zero:
            Path(filepath).parent.mkdir(parents=True, exist_ok=True)
            torch.save(checkpoint, filepath)

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end after this round."""
        return self.run is not None and (self.run.stop_request or self.run.stop_reason) is not None

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        # Each client makes the steps that the loop asks for, and the run ends after the round.
        if self.run is not None:
            self.run.stop_request = "`trainer.should_stop` was set" if stop else None

    def __getattr__(self, name: str) -> Any:
        if name == TRAINER_RESULTS:
            raise RuntimeError(
                "`self.log` was called where there is nothing to log to in a federated run."
                " Call it in a step of training, validation or test, or in a hook around those."
            )
        raise not_available("Trainer", "self.trainer", name, vars(self)["lightning_module"])

    @contextmanager
    def attached(self, owner: LightningModule | LightningDataModule) -> Iterator[None]:
        """Be ``owner.trainer``."""
        before = trainer_of(owner)
        owner.trainer = self  # type: ignore[assignment]
        try:
            yield
        finally:
            owner.trainer = before

    @contextmanager
    def detached(self, owner: LightningModule) -> Iterator[None]:
        """Leave it without a trainer for a while, for Lightning's own tools that know what to do without one."""
        owner.trainer = None
        try:
            yield
        finally:
            owner.trainer = self  # type: ignore[assignment]
