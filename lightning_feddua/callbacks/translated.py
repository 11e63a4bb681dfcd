"""What Lightning's own callbacks become over rounds. Each writes its results into the callback that was given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_feddua._private import checkpoint_triggers
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.checkpoint import Checkpoint
from lightning_feddua.callbacks.early_stopping import EarlyStopping
from lightning_feddua.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.loop import FederatedLoop


class LightningCallback(FederatedCallback):
    """Stands in a loop's list for a callback of Lightning's, whose hooks are called with those of the module.

    Args:
        callback: it; checkpoints keep its state where Trainer does.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = self.owner = callback


class _Published(FederatedCallback):
    """Comes before one of ours, and keeps the results in a callback of Lightning's up to date."""

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Begin with the state of the run."""
        super().on_fit_start(loop)
        self._publish()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume, and tell."""
        super().load_state_dict(state)
        self._publish()

    def _publish(self) -> None:
        raise NotImplementedError


class StoppedEarly(_Published, EarlyStopping):
    """``EarlyStopping`` of Lightning's, over rounds.

    Args:
        callback: it.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        super().__init__(
            callback.monitor,
            abs(callback.min_delta),
            callback.patience,
            callback.verbose,
            callback.mode,
            callback.strict,
            callback.check_finite,
            callback.stopping_threshold,
            callback.divergence_threshold,
        )

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Decide, and tell."""
        super().on_round_end(loop, round)
        self._publish()

    def _publish(self) -> None:
        callback = self.callback
        callback.best_score = torch.tensor(self.best_score)
        callback.wait_count = self.wait_count
        callback.stopped_epoch = self.stopped_round or 0
        # Not in older versions.
        if hasattr(callback, "stopping_reason"):
            callback.stopping_reason = type(callback.stopping_reason)[self.stopping_reason]
            callback.stopping_reason_message = self.stopping_reason_message


class RoundCheckpoint(_Published, Checkpoint):
    """``ModelCheckpoint`` of Lightning's, over rounds: in the run's folder, or where the callback says.

    Args:
        callback: it.
    """

    keeps_end = False

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        steps, interval = checkpoint_triggers(callback)
        if steps or interval is not None:
            given = f"every_n_train_steps={steps}" if steps else f"train_time_interval={interval}"
            raise ConfigurationError(
                f"`{type(callback).__name__}({given})` would save in the middle of a client.",
                "Use `every_n_epochs`, which counts rounds, or `FederatedLoop(checkpoint_every=…)`.",
            )
        if getattr(callback, "save_on_exception", False):
            raise ConfigurationError(
                f"`{type(callback).__name__}(save_on_exception=True)` would save in the middle of a round.",
                "Use `every_n_epochs=1`, which keeps the last whole round.",
            )
        if getattr(callback, "save_weights_only", False):
            raise ConfigurationError(
                f"`{type(callback).__name__}(save_weights_only=True)` would keep files that no run resumes from.",
                "Leave it out; `load_from_checkpoint` takes the weights alone from any file.",
            )
        self._named = callback.filename is not None or callback.dirpath is not None
        monitor = callback.monitor
        super().__init__(
            every=callback.every_n_epochs or None,
            monitor=monitor,
            mode=None if monitor is None else callback.mode,
            save_top_k=callback.save_top_k,
        )

    def file_name(self, loop: FederatedLoop, rounds: int) -> str:
        """As the callback names its files, where it was told to."""
        if not self._named:
            return super().file_name(loop, rounds)
        row = dict(loop.history[-1]) if loop.history else {}
        row |= {known: row[column] for known, column in loop.run.columns.renamed.items() if column in row}
        metrics = {name: torch.tensor(value) for name, value in row.items()}
        metrics |= {"epoch": torch.tensor(max(rounds - 1, 0)), "step": torch.tensor(rounds)}
        default = None if self.callback.filename is not None else "{epoch}-{step}"
        name: str = self.callback.format_checkpoint_name(metrics, default)
        return str(Path(name).absolute()) if self.callback.dirpath is not None else name

    def _is_own(self, name: Any) -> bool:
        dirpath = self.callback.dirpath
        if not self._named or not isinstance(name, str) or not name.endswith(".ckpt"):
            return super()._is_own(name)
        inside = Path(name) if dirpath is None else Path(name).relative_to(Path(dirpath).absolute())
        return not inside.is_absolute() and ".." not in inside.parts

    def _publish(self) -> None:
        callback, score = self.callback, self.best_model_score
        callback.best_model_path, callback.last_model_path = self.best_model_path, self.last_model_path
        callback.best_model_score = None if score is None else torch.tensor(score)
        callback.best_k_models = {path: torch.tensor(value) for path, value in self.best_k_models.items()}
        if self.best_k_models:
            callback.kth_best_model_path = list(self.best_k_models)[-1]
            callback.kth_value = callback.best_k_models[callback.kth_best_model_path]


class RoundTimer(FederatedCallback):
    """``Timer`` of Lightning's: the whole run counts as training, and the time is looked at after each round.

    Args:
        callback: it.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Start the clock."""
        self.callback.on_train_start(None, None)

    def on_validation_start(self, loop: FederatedLoop) -> None:
        """Start the clock of validation."""
        self.callback.on_validation_start(None, None)

    def on_validation_end(self, loop: FederatedLoop, metrics: dict[str, float]) -> None:
        """Stop it."""
        self.callback.on_validation_end(None, None)

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Ask for the end when the time is over; all ranks end if it is over for one."""
        left = self.callback.time_remaining()
        if left is not None and left <= 0:
            loop.run.stop_request = f"the time limit of {self.callback.time_elapsed() + left:.0f} s is reached"

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Stop the clock."""
        self.callback.on_train_end(None, None)

    def state_dict(self) -> dict[str, Any]:
        """The time so far."""
        return self.callback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self.callback.load_state_dict(state)


class Rates(FederatedCallback):
    """``LearningRateMonitor`` of Lightning's: the learning rates that the clients of a round start with.

    They are columns of ``loop.history``, named as the callback names them.

    Args:
        callback: it.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Forget earlier runs."""
        self.callback.lrs = {}

    def on_aggregate_end(self, loop: FederatedLoop, update: RoundUpdate) -> None:
        """Add them to the round's metrics."""
        assert loop._federation is not None
        optimizers = loop._federation.optimizers
        # As each client gets them.
        optimizers.reset(loop.local_lr_decay**loop.current_round)
        names = {id(config.scheduler.optimizer): config.name for config in optimizers.schedulers if config.name}
        for place, optimizer in enumerate(optimizers.optimizers):
            kinds = [type(other) for other in optimizers.optimizers[:place]]
            again = kinds.count(type(optimizer))
            name = names.get(id(optimizer)) or f"lr-{type(optimizer).__name__}" + (f"-{again}" if again else "")
            groups = optimizer.param_groups
            for number, group in enumerate(groups):
                own = group.get("name", f"pg{number + 1}" if len(groups) > 1 else None)
                self._note(update, f"{name}/{own}" if own else name, group, optimizers.lr_factor)

    def _note(self, update: RoundUpdate, name: str, group: dict[str, Any], lr_factor: float) -> None:
        update.metrics[name] = rate = float(group["lr"]) * lr_factor
        self.callback.lrs.setdefault(name, []).append(rate)
        if self.callback.log_momentum:
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
            update.metrics[f"{name}-momentum"] = float(momentum)
        if self.callback.log_weight_decay:
            update.metrics[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
