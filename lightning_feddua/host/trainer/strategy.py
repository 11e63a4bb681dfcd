"""What an unmodified LightningModule finds at ``self.trainer.strategy`` and ``self.trainer.precision_plugin``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_feddua.host.trainer.refusals import not_available

if TYPE_CHECKING:
    from lightning_feddua.host.trainer.view import TrainerView


class StrategyView:
    """Answers as the strategy of a client's own Trainer, which has one device: nothing is exchanged."""

    strategy_name = "single_device"
    launcher = None
    handles_gradient_accumulation = False

    def __init__(self, view: TrainerView) -> None:
        self._view = view
        self.precision_plugin = PrecisionView(self)
        # Set by the engine: runs a closure and steps an optimizer with the module's hooks around it.
        self.optimizer_step: Callable[..., Any] | None = None

    @property
    def lightning_module(self) -> LightningModule:
        """The module in training."""
        return self._view.lightning_module

    model = lightning_module

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._view._fabric.device

    @property
    def accelerator(self) -> Any:
        """The kind of device."""
        return self._view.accelerator

    @property
    def optimizers(self) -> list[Optimizer]:
        """The module's own optimizers."""
        return self._view.optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The module's own learning-rate schedulers."""
        return self._view.lr_scheduler_configs

    @property
    def is_global_zero(self) -> bool:
        """As the view says."""
        return self._view.is_global_zero

    @property
    def global_rank(self) -> int:
        """As the view says."""
        return self._view.global_rank

    @property
    def local_rank(self) -> int:
        """As the view says."""
        return self._view.local_rank

    @property
    def world_size(self) -> int:
        """As the view says."""
        return self._view.world_size

    @property
    def _lightning_optimizers(self) -> list[Any]:
        optimizers = self._view.local_optimizers
        return [] if optimizers is None else optimizers.wrapped

    def backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Backward pass in the run's precision, for ``manual_backward``."""
        self._view._fabric.strategy.backward(loss, None, *args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Values stay local; the loop reduces them once per round."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensor itself, as on a single device."""
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object itself, as on a single device."""
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The decision itself, as on a single device."""
        return decision

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """There is nobody to wait for."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to a device, by default the run's."""
        return self.lightning_module.transfer_batch_to_device(batch, device or self.root_device, dataloader_idx)

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """New tensors are made on the run's device and in its precision."""
        return self._view.init_module(empty_init)

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip the gradients of one optimizer, by global norm or by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not clip_val or clip_val <= 0:
            return
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    def __getattr__(self, name: str) -> Any:
        raise not_available("strategies.Strategy", "self.trainer.strategy", name, vars(self)["_view"].lightning_module)


class PrecisionView:
    """Fabric's precision, with the names that Trainer's has besides."""

    def __init__(self, strategy: StrategyView) -> None:
        self._strategy = strategy

    @property
    def precision(self) -> Any:
        """Such as ``"32-true"``."""
        return self._fabrics.precision

    @property
    def scaler(self) -> Any:
        """The gradient scaler of 16-mixed precision, or None."""
        return getattr(self._fabrics, "scaler", None)

    @property
    def _fabrics(self) -> Any:
        return self._strategy._view._fabric.strategy.precision

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of a step."""
        return self._fabrics.forward_context()

    train_step_context = val_step_context = test_step_context = predict_step_context = forward_context

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of one optimizer, by global norm or by value."""
        self._strategy.clip_gradients(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("convert_") or name.endswith("_init_context"):
            return getattr(self._fabrics, name)
        module = vars(self)["_strategy"].lightning_module
        raise not_available("plugins.Precision", "self.trainer.precision_plugin", name, module)
