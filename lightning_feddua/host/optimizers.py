"""The optimizers and schedulers that a module configures, made once and reset for each client."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning import LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_feddua._private import parse_optimizers, parse_schedulers, wrap_optimizer
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.trainer.strategy import StrategyView
from lightning_feddua.lightning_names import is_overridden


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
        self.optimizers, schedulers, monitor = parse_optimizers(configured, module)
        if module.automatic_optimization and len(self.optimizers) != 1:
            raise ConfigurationError(
                f"`{name}.configure_optimizers` returned {len(self.optimizers)} optimizers.",
                "Return one, or set `self.automatic_optimization = False` and step them yourself.",
            )
        configs = [s if isinstance(s, dict) else {"scheduler": s, "monitor": monitor} for s in schedulers]
        unwatched = [c for c in configs if isinstance(c.get("scheduler"), ReduceLROnPlateau) and not c.get("monitor")]
        if unwatched and module.automatic_optimization:
            raise ConfigurationError(
                f"`{name}.configure_optimizers` returned a `ReduceLROnPlateau` without a `monitor`.",
                "Return `{'scheduler': scheduler, 'monitor': name}`, with the name of a metric that is logged.",
            )
        self.schedulers = parse_schedulers(schedulers, monitor, module)
        # In manual optimization, the module steps all of them itself.
        stepped = self.schedulers if module.automatic_optimization else []
        self._plain = [config for config in stepped if not config.reduce_on_plateau]
        # Those that watch a metric, by their places.
        self.plateaus = {place: config for place, config in enumerate(stepped) if config.reduce_on_plateau}
        self.wrapped = [wrap_optimizer(optimizer, strategy, module) for optimizer in self.optimizers]
        self._module = module
        # Multiplies all learning rates while an optimizer steps.
        self.lr_factor = 1.0
        # Most optimizers make their state in the first step; what others have from the start is kept.
        self._initial_states = [_copy_state(optimizer.state) for optimizer in self.optimizers]
        self._initial_groups = [[_without_params(group) for group in o.param_groups] for o in self.optimizers]
        self._initial_schedulers = [copy.deepcopy(config.scheduler.state_dict()) for config in self.schedulers]
        # As the module has made them, before rounds change anything.
        self._first_rates = self._rates()
        self._first_schedulers = copy.deepcopy(self._initial_schedulers)

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer's first group."""
        return float(self.optimizers[0].param_groups[0]["lr"]) * self.lr_factor

    def reset(self, lr_factor: float = 1.0) -> None:
        """As new, with all learning rates to be multiplied by a factor.

        Raises:
            ConfigurationError: an optimizer has got another group of parameters since.
        """
        if [*map(len, self._initial_groups)] != [len(optimizer.param_groups) for optimizer in self.optimizers]:
            raise ConfigurationError(
                f"An optimizer of `{type(self._module).__name__}` got a group of parameters in a client's local steps.",
                "Give it all groups in `configure_optimizers`, and let them require gradients from the start.",
            )
        self.lr_factor = lr_factor
        for i, (optimizer, groups) in enumerate(zip(self.optimizers, self._initial_groups, strict=True)):
            optimizer.state.clear()
            optimizer.state.update(_copy_state(self._initial_states[i]))
            for group, initial in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: _copy_tensor(value) for key, value in initial.items()})
        for config, state in zip(self.schedulers, self._initial_schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))

    def objects(self) -> list[object]:
        """All that is reset: optimizers, as they are and wrapped, and schedulers."""
        return [*self.optimizers, *self.wrapped, *(config.scheduler for config in self.schedulers)]

    def release(self) -> None:
        """Give the memory of the optimizers' states back until the next reset."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def decayed(self, optimizer: Optimizer) -> "DecayedRates | None":
        """The rates of one optimizer, multiplied for a step; None where there is nothing to multiply."""
        return None if self.lr_factor == 1.0 else DecayedRates(optimizer, self.lr_factor)

    def step_schedulers(self, interval: str, count: int) -> None:
        """Step the schedulers of an interval after its ``count``-th step or epoch, as Trainer does.

        Those that watch a metric have a method of their own.
        """
        for config in self._plain:
            if config.interval == interval and count % config.frequency == 0:
                self._module.lr_scheduler_step(config.scheduler, None)

    def step_plateaus(self, interval: str, count: int, logged: Callable[[], Mapping[str, Any]]) -> None:
        """Step the schedulers of an interval that watch a metric, where the client has logged it.

        Args:
            interval: ``"step"`` or ``"epoch"``.
            count: how many of these have been.
            logged: what the client has logged so far.
        """
        due = [c for c in self.plateaus.values() if c.interval == interval and count % c.frequency == 0]
        values = logged() if due else {}
        for config in due:
            if config.monitor in values:
                self._module.lr_scheduler_step(config.scheduler, values[config.monitor])

    def step_for_round(self, place: int, metric: Any) -> None:
        """Step a scheduler on a metric of the round: all later clients start from where it then is.

        Args:
            place: which one.
            metric: what it watches.
        """
        self.reset()
        scheduler = self.schedulers[place].scheduler
        self._module.lr_scheduler_step(scheduler, metric)
        self._initial_schedulers[place] = copy.deepcopy(scheduler.state_dict())
        for optimizer, groups in zip(self.optimizers, self._initial_groups, strict=True):
            for group, initial in zip(optimizer.param_groups, groups, strict=True):
                initial["lr"] = _copy_tensor(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """What rounds have changed: the states of schedulers that watch a metric, and all learning rates."""
        if not self.plateaus:
            return {}
        return {
            "rates": self._rates(),
            "schedulers": {str(i): copy.deepcopy(self._initial_schedulers[i]) for i in self.plateaus},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for groups, rates in zip(self._initial_groups, state.get("rates", []), strict=False):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = _copy_tensor(rate)
        for place, saved in state.get("schedulers", {}).items():
            self._initial_schedulers[int(place)] = copy.deepcopy(saved)

    def follow(self, other: "LocalOptimizers") -> None:
        """Let rounds have changed these as they have changed those of a client of another size.

        Args:
            other: the same optimizers and schedulers, maybe with other learning rates.
        """
        floors = self._floors()
        for place, groups in enumerate(self._initial_groups):
            rates = zip(self._first_rates[place], other._first_rates[place], other._rates()[place], strict=True)
            for number, (own, first, now) in enumerate(rates):
                groups[number]["lr"] = _copy_tensor(_lowered(own, first, now, floors[place][number]))
        for place, config in self.plateaus.items():
            first, now = other._first_schedulers[place], other._initial_schedulers[place]
            changed = {key: value for key, value in now.items() if key not in first or first[key] != value}
            state = copy.deepcopy({**self._first_schedulers[place], **changed})
            if "_last_lr" in changed:
                optimizer = self.optimizers.index(config.scheduler.optimizer)
                state["_last_lr"] = self._rates()[optimizer]
            self._initial_schedulers[place] = state

    def _rates(self) -> list[list[Any]]:
        """The learning rates that clients start with, of each optimizer and group."""
        return [[_copy_tensor(group["lr"]) for group in groups] for groups in self._initial_groups]

    def _floors(self) -> list[list[float]]:
        """The smallest rates that a scheduler on a metric goes down to."""
        floors = [[0.0] * len(groups) for groups in self._initial_groups]
        for config in self.plateaus.values():
            floors[self.optimizers.index(config.scheduler.optimizer)] = list(config.scheduler.min_lrs)
        return floors


class DecayedRates:
    """Multiplies an optimizer's learning rates for one step.

    Outside of it the rates are those of the module's own schedule, so that schedulers and hooks can write them in any
    way: relative to what they were, or as absolute values.

    Args:
        optimizer: the optimizer.
        factor: what its rates are multiplied by.
    """

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self._groups = optimizer.param_groups
        self._factor = factor
        self._own = [group["lr"] for group in self._groups]
        self._multiplied = [rate * factor for rate in self._own]
        self._write(self._multiplied)

    def renew(self) -> None:
        """Multiply a rate that the module itself has written since."""
        for place, group in enumerate(self._groups):
            if group["lr"] is not self._multiplied[place]:
                self._own[place] = group["lr"]
                self._multiplied[place] = group["lr"] = group["lr"] * self._factor

    def undo(self) -> None:
        """Give the module's own rates back."""
        self._write(self._own)

    def _write(self, rates: list[Any]) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            group["lr"] = rate


def _copy_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state: the values are copied, the parameters that it belongs to are not."""
    return {parameter: copy.deepcopy(values) for parameter, values in state.items()}


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_tensor(value) for key, value in group.items() if key != "params"}


def _lowered(own: Any, first: Any, now: Any, floor: float) -> Any:
    """A rate, changed by the factor by which another has changed."""
    if own == first or first == 0:
        return now if own == first else own
    return own if now == first else max(own * (now / first), min(own, floor))


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
