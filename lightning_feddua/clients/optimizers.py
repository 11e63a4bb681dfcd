"""The optimizers and schedulers that a module configures, made once and reset for each client."""

import copy
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.core.optimizer import (
    LightningOptimizer,
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
    _validate_scheduler_api,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_feddua.errors import ConfigurationError
from lightning_feddua.trainer_view import StrategyView


class LocalOptimizers:
    """What ``configure_optimizers`` returns, in any of its shapes.

    Args:
        module: the module, with its parameters in place.
        strategy: what ``optimizer.step`` of the wrapped optimizers goes through.
    """

    def __init__(self, module: LightningModule, strategy: StrategyView) -> None:
        name = type(module).__name__
        if not is_overridden("configure_optimizers", module):
            raise ConfigurationError(
                f"`{name}` does not define `configure_optimizers`.", "Return the clients' local optimizer from it."
            )
        configured = module.configure_optimizers()
        if configured is None:
            raise ConfigurationError(
                f"`{name}.configure_optimizers` returned `None`.", "Return the clients' local optimizer from it."
            )
        self.optimizers: list[Optimizer]
        self.optimizers, schedulers, monitor = _configure_optimizers(configured)  # type: ignore[arg-type]
        if module.automatic_optimization and len(self.optimizers) != 1:
            raise ConfigurationError(
                f"`{name}.configure_optimizers` returned {len(self.optimizers)} optimizers.",
                "Return one, or set `self.automatic_optimization = False` and step them yourself.",
            )
        configs = [s.get("scheduler") if isinstance(s, dict) else s for s in schedulers]
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in configs):
            raise ConfigurationError(
                f"`{name}.configure_optimizers` returned a `ReduceLROnPlateau`, and a client has no metric to watch.",
                "Use another scheduler, or the loop's `local_lr_decay`.",
            )
        if module.automatic_optimization:
            self.schedulers = _configure_schedulers_automatic_opt(schedulers, monitor)
        else:
            self.schedulers = _configure_schedulers_manual_opt(schedulers)
        _validate_scheduler_api(self.schedulers, module)
        self.wrapped = [LightningOptimizer._to_lightning_optimizer(o, strategy) for o in self.optimizers]  # type: ignore[arg-type]
        self._module = module
        self._initial_groups = [[_without_params(group) for group in o.param_groups] for o in self.optimizers]
        self._initial_schedulers = [copy.deepcopy(config.scheduler.state_dict()) for config in self.schedulers]

    def reset(self, lr_factor: float = 1.0) -> None:
        """As new, with all learning rates multiplied by a factor."""
        for optimizer, groups in zip(self.optimizers, self._initial_groups, strict=True):
            optimizer.state.clear()
            for group, initial in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: _copy_tensor(value) for key, value in initial.items()})
                group["lr"] = group["lr"] * lr_factor
                if "initial_lr" in group:
                    group["initial_lr"] = group["initial_lr"] * lr_factor
        for config, state in zip(self.schedulers, self._initial_schedulers, strict=True):
            state = copy.deepcopy(state)
            if "base_lrs" in state:
                state["base_lrs"] = [lr * lr_factor for lr in state["base_lrs"]]
            config.scheduler.load_state_dict(state)

    def step_schedulers(self, interval: str, count: int) -> None:
        """Step the schedulers of an interval after its ``count``-th step or epoch, as Trainer does."""
        for config in self.schedulers:
            if config.interval == interval and count % config.frequency == 0:
                self._module.lr_scheduler_step(config.scheduler, None)


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_tensor(value) for key, value in group.items() if key != "params"}


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
