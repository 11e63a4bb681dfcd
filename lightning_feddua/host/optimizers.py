"""The optimizers and schedulers that a module configures, made once and reset for each client."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_feddua._private import (
    SCHEDULER_CHILDREN,
    SCHEDULER_LAST_RATES,
    parse_optimizers,
    parse_schedulers,
    wrap_optimizer,
)
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.trainer_view import StrategyView


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
        self.optimizers, schedulers, monitor = parse_optimizers(configured)
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
        self.schedulers = parse_schedulers(schedulers, monitor, module)
        self.wrapped = [wrap_optimizer(optimizer, strategy) for optimizer in self.optimizers]
        self._module = module
        # Most optimizers make their state in the first step; what others have from the start is kept.
        self._initial_states = [_copy_state(optimizer.state) for optimizer in self.optimizers]
        self._initial_groups = [[_without_params(group) for group in o.param_groups] for o in self.optimizers]
        self._initial_schedulers = [copy.deepcopy(config.scheduler.state_dict()) for config in self.schedulers]

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer's first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def reset(self, lr_factor: float = 1.0) -> None:
        """As new, with all learning rates multiplied by a factor."""
        for i, (optimizer, groups) in enumerate(zip(self.optimizers, self._initial_groups, strict=True)):
            optimizer.state.clear()
            optimizer.state.update(_copy_state(self._initial_states[i]))
            for group, initial in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: _copy_tensor(value) for key, value in initial.items()})
                for key in _RATES & group.keys():
                    group[key] = group[key] * lr_factor
        for config, state in zip(self.schedulers, self._initial_schedulers, strict=True):
            config.scheduler.load_state_dict(_scaled(copy.deepcopy(state), lr_factor))

    def step_schedulers(self, interval: str, count: int) -> None:
        """Step the schedulers of an interval after its ``count``-th step or epoch, as Trainer does."""
        for config in self.schedulers:
            if config.interval == interval and count % config.frequency == 0:
                self._module.lr_scheduler_step(config.scheduler, None)


# Learning rates in a parameter group: its own, and those that cyclic schedulers keep there.
_RATES = {"lr", "initial_lr", "max_lr", "min_lr"}


def _scaled(state: dict[str, Any], factor: float) -> dict[str, Any]:
    """A scheduler's state with its learning rates multiplied, those of schedulers inside it included."""
    for key in ("base_lrs", "max_lrs", SCHEDULER_LAST_RATES):
        if key in state:
            state[key] = [rate * factor for rate in state[key]]
    for inner in state.get(SCHEDULER_CHILDREN, []):
        _scaled(inner, factor)
    return state


def _copy_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state: the values are copied, the parameters that it belongs to are not."""
    return {parameter: copy.deepcopy(values) for parameter, values in state.items()}


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_tensor(value) for key, value in group.items() if key != "params"}


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
