"""Which optimizers and schedulers a client trains with, and those schedulers that watch a metric of the round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_feddua.aggregation.collectives import gather_objects
from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.host.optimizers import LocalOptimizers
from lightning_feddua.host.trainer.view import TrainerView
from lightning_feddua.metric_names import LOOP_COLUMNS, LOSS, VALIDATION

if TYPE_CHECKING:
    from lightning_feddua.engines.base import LocalWork
    from lightning_feddua.settings import RunSettings

# Schedules of clients of so many sizes are kept; others are made again.
_MOST_SIZES = 64
_MISSING = object()


class LocalSchedules:
    """Local optimizers: the same for all clients, or one set for each size if the module asks how long training is.

    Args:
        fabric: for what ranks agree on.
        module: the module, with its parameters in place.
        view: what it finds at ``self.trainer``, which tells it how long training is.
        work: how much each client does.
        sizes: the clients' sizes as their work is counted, found out when they are needed.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: LightningModule,
        view: TrainerView,
        work: LocalWork,
        sizes: Callable[[], np.ndarray],
    ) -> None:
        self._fabric = fabric
        self._module, self._view, self._work = module, view, work
        self._asked = False
        # What `configure_optimizers` sets in the module belongs to the optimizers that it returns.
        self._attributes: dict[LocalOptimizers, dict[str, Any]] = {}
        # Checkpoints and the header describe a run by the schedule of its largest client.
        self.largest = self._make(lambda: int(sizes().max()))
        self._by_size: dict[int, LocalOptimizers] | None = None
        if self._asked and sizes().min() < sizes().max():
            self._by_size = {int(sizes().max()): self.largest}
        self._current = self.largest

    def of(self, size: int | None = None) -> LocalOptimizers:
        """The optimizers of clients with this many samples; of the largest if None."""
        if self._by_size is None:
            return self.largest
        found = self.largest if size is None else self._by_size.get(size)
        if found is None:
            assert size is not None
            if len(self._by_size) == _MOST_SIZES:
                oldest = next(known for known, made in self._by_size.items() if made is not self.largest)
                del self._attributes[self._by_size.pop(oldest)]
            found = self._by_size[size] = self._make(lambda: size)
            found.follow(self.largest)
        if found is not self._current:
            self._current.release()
            self._current = found
        for name, value in self._attributes[found].items():
            setattr(self._module, name, value)
        return found

    def _make(self, size: Callable[[], int]) -> LocalOptimizers:
        def ask() -> int:
            self._asked = True
            return size()

        before = dict(vars(self._module))
        self._view.start_client(self._work, ask)
        made = LocalOptimizers(self._module, self._view.strategy)
        self._attributes[made] = {
            name: value for name, value in vars(self._module).items() if before.get(name, _MISSING) is not value
        }
        return made

    def obstacle(self) -> str | None:
        """Why clients cannot share the steps of one optimizer, as the end of a sentence; None if they can."""
        if self.largest.plateaus:
            return "its `ReduceLROnPlateau` may watch a metric of each client"
        return None if self._by_size is None else "its schedule depends on the size of the client"

    def end_round(self, round: int, validate_every: int, training: Mapping[str, float], row: Mapping[str, Any]) -> None:
        """Step the schedulers that watch a validation metric; the same on every rank.

        The round that is validated for being the last does not count, so that a run that is made longer goes on as if
        it had been planned so.

        Args:
            round: the round.
            validate_every: after how many rounds there is a validation; 0 for never.
            training: what clients have logged. A scheduler that watches one of these is stepped in each client.
            row: all metrics of the round.
        """
        for place, config in self.largest.plateaus.items():
            due = (round + 1) % max(validate_every, 1) == 0 and (round + 1) % config.frequency == 0
            if not due or self._in_clients(config.monitor, training):
                continue
            # The column without a prefix is that of the loss which clients return.
            column = f"{VALIDATION}/{LOSS}" if config.monitor == LOSS else config.monitor
            if column not in row:
                _warn_or_refuse(config, [name for name in row if name not in {*LOOP_COLUMNS, LOSS}])
                continue
            self.largest.step_for_round(place, row[column])
            self._follow()

    def awaited(self, validate_every: int) -> list[str]:
        """Metrics that have to be logged by clients, because schedulers watch them and nothing is validated."""
        if validate_every > 0 and self._view.enable_validation:
            return []
        watched = [config.monitor for config in self.largest.plateaus.values() if config.strict]
        return [monitor for monitor in watched if monitor not in LOOP_COLUMNS]

    def check_logged(self, awaited: Sequence[str], logged: Collection[str]) -> None:
        """One clear error for a metric that nobody would log."""
        for monitor in awaited:
            if monitor not in logged:
                raise ConfigurationError(
                    f"A `ReduceLROnPlateau` watches `{monitor}`, which clients do not log, and nothing is validated.",
                    "Give validation data, a `validation_step` and a `validate_every`, or set `monitor` to a metric"
                    " that `training_step` logs.",
                )

    def _in_clients(self, monitor: str, training: Mapping[str, float]) -> bool:
        """Whether clients log a metric themselves; the same on every rank."""
        if monitor in training and monitor != LOSS:
            return True
        if monitor != LOSS and not monitor.endswith(("_step", "_epoch")):
            return False
        # Other names than those of the round's metrics are known only to the rank that has trained the client.
        return any(gather_objects(self._fabric, monitor in self._view.logged_names()))

    def state_dict(self) -> dict[str, Any]:
        """What rounds have changed."""
        return self.largest.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self.largest.load_state_dict(state)
        self._follow()

    def _follow(self) -> None:
        """Clients of all sizes have the largest's state, each with its own learning rates."""
        for optimizers in (self._by_size or {}).values():
            if optimizers is not self.largest:
                optimizers.follow(self.largest)


def check_manual_optimization(module: LightningModule, settings: RunSettings) -> None:
    """One clear error for what a module that optimizes manually does itself, as under Trainer."""
    wanted = {"gradient_clip_val": settings.gradient_clip_val, "accumulate_grad_batches": None}
    if settings.accumulate_grad_batches > 1:
        wanted["accumulate_grad_batches"] = settings.accumulate_grad_batches
    given = [f"`{name}={value}`" for name, value in wanted.items() if value is not None]
    if given and not module.automatic_optimization:
        raise ConfigurationError(
            f"`{type(module).__name__}` makes its steps itself (`automatic_optimization = False`), so that"
            f" {' and '.join(given)} would do nothing.",
            "Leave it out, and do the same in `training_step`.",
        )


def _warn_or_refuse(config: Any, available: list[str]) -> None:
    """For a metric that nobody has logged, as Trainer does."""
    problem = f"A `ReduceLROnPlateau` watches `{config.monitor}`, which neither clients nor the validation have logged."
    if config.strict:
        raise ConfigurationError(problem, f"Log it, or set `monitor` to one of {choices(available)}.")
    rank_zero_warn(f"{problem} Learning rates stay as they are, because it is not `strict`.")
