"""What an unmodified LightningModule finds at ``self.trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import Optimizer

from lightning_feddua._private import TRAINER_RESULTS, trainer_of

if TYPE_CHECKING:
    from lightning_feddua.engines.base import LocalWork
    from lightning_feddua.host.optimizers import LocalOptimizers


class TrainerView:
    """Answers for the Trainer that a LightningModule was written for.

    Counters have local meaning: ``current_epoch`` and ``global_step`` count the passes and optimizer steps of the
    client in training, from 0 in each round; ``max_epochs``, ``max_steps`` and ``estimated_stepping_batches`` are those
    of one client in one round. ``current_round`` and ``max_rounds`` tell where the federated run is.

    Args:
        fabric: answers for ranks and devices.
        module: the module in training.
    """

    barebones = False
    fast_dev_run = False
    sanity_checking = False
    predicting = False
    accumulate_grad_batches = 1
    gradient_clip_algorithm = None
    progress_bar_callback = None
    profiler = None

    def __init__(self, fabric: Fabric, module: LightningModule) -> None:
        self._fabric = fabric
        self.lightning_module = self.model = module
        self.strategy = StrategyView(self)
        self.precision_plugin = self.strategy
        self.local_optimizers: LocalOptimizers | None = None
        self.datamodule: Any = None
        self.callbacks: list[Any] = []
        self.round_metrics: dict[str, Tensor] = {}
        # What the module has logged since: in this client, or in this validation.
        self.logged_since: Callable[[], dict[str, Tensor]] = dict
        self.gradient_clip_val: float | None = None
        self.default_root_dir = self.log_dir = "."
        self.training = self.validating = self.testing = False
        self.current_round = 0
        self.max_rounds = 0
        self._epoch: int | None = 0
        self.global_step = 0
        self._work: LocalWork | None = None
        self._client_size: int | Callable[[], int] = 0
        self.is_last_batch = False

    @property
    def current_epoch(self) -> int:
        """The client's current pass over its data."""
        if self._epoch is None:
            raise RuntimeError(
                "`self.current_epoch` differs between the clients of one vectorized step. Use `engine='sequential'`."
            )
        return self._epoch

    @current_epoch.setter
    def current_epoch(self, epoch: int | None) -> None:
        self._epoch = epoch

    def stop_client(self) -> None:
        """Counters as they are outside of clients."""
        self.training = False
        self.logged_since = dict
        self.current_epoch = self.global_step = 0

    def start_client(self, work: LocalWork, size: int | Callable[[], int]) -> None:
        """Counters for a client with this many samples, before its first step.

        Args:
            work: how much the client does.
            size: its number of samples; a function where it costs something to find out, called when a module asks.
        """
        self.current_epoch = self.global_step = 0
        self._work, self._client_size = work, size

    @property
    def max_steps(self) -> int:
        """Optimizer steps of one client in one round."""
        if self._work is None:
            return -1
        return self._work.steps if self._work.steps is not None else self._work.batches(self._size)

    @property
    def num_training_batches(self) -> int:
        """Minibatches in one pass over the client's data."""
        return 0 if self._work is None else -(-self._size // self._work.batch_size)

    @property
    def max_epochs(self) -> int | None:
        """Passes of one client in one round, the last of which may be incomplete."""
        if self._work is None or self._work.epochs is not None:
            return None if self._work is None else self._work.epochs
        return -(-self.max_steps // self.num_training_batches)

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
    def loggers(self) -> list[Any]:
        """The run's loggers."""
        return self._fabric.loggers

    @property
    def logger(self) -> Any:
        """The run's first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest round's metrics, and what the client in training, or a validation at its end, has logged."""
        return {**self.round_metrics, **self.logged_since()}

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def should_stop(self) -> bool:
        """Whether training is to end, which is not for a client to say."""
        return False

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            raise RuntimeError(
                "`self.trainer.should_stop` cannot be set in a federated run: each client makes the steps that the loop"
                f" asks for. Remove its use from `{type(self.lightning_module).__name__}`."
            )

    @property
    def num_devices(self) -> int:
        """Ranks on this node."""
        return self._fabric.world_size // self.num_nodes

    @property
    def num_nodes(self) -> int:
        """Nodes in the run."""
        return getattr(self._fabric.strategy, "num_nodes", 1)

    def __getattr__(self, name: str) -> Any:
        if name in ("is_global_zero", "global_rank", "local_rank", "node_rank", "world_size", "print"):
            return getattr(self._fabric, name)
        if name == TRAINER_RESULTS:
            raise RuntimeError(
                "`self.log` was called where there is nothing to log to in a federated run."
                " Call it in a step of training, validation or test, or in a hook around those."
            )
        raise AttributeError(
            f"`self.trainer.{name}` is not available in a federated run. Remove its use from"
            f" `{type(self.lightning_module).__name__}`, or guard it with `hasattr(self.trainer, {name!r})`."
        )

    @contextmanager
    def attached(self, owner: LightningModule | LightningDataModule) -> Iterator[None]:
        """Be ``owner.trainer``."""
        before = trainer_of(owner)
        owner.trainer = self  # type: ignore[assignment]
        try:
            yield
        finally:
            owner.trainer = before


class StrategyView:
    """The few parts of ``trainer.strategy`` and ``trainer.precision_plugin`` that LightningModules reach for."""

    def __init__(self, view: TrainerView) -> None:
        self._view = view
        # Set by the engine: runs a closure and steps an optimizer with the module's hooks around it.
        self.optimizer_step: Callable[..., Any] | None = None

    @property
    def lightning_module(self) -> LightningModule:
        """The module in training."""
        return self._view.lightning_module

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._view._fabric.device

    @property
    def _lightning_optimizers(self) -> list[Any]:
        optimizers = self._view.local_optimizers
        return [] if optimizers is None else optimizers.wrapped

    def backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Backward pass in the run's precision, for ``manual_backward``."""
        self._view._fabric.strategy.backward(loss, None, *args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Values stay local during local training; the loop reduces them once per round."""
        return tensor

    def clip_gradients(self, optimizer: Optimizer, clip_val: float = 0.0, algorithm: str = "norm") -> None:
        """Clip the gradients of one optimizer, by global norm or by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not clip_val or clip_val <= 0:
            return
        if str(getattr(algorithm, "value", algorithm)) == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`self.trainer.strategy.{name}` is not available in a federated run."
            f" Remove its use from `{type(self._view.lightning_module).__name__}`."
        )
