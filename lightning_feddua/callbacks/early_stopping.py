from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.monitored import check_mode, check_monitor, monitored
from lightning_feddua.checks import check_number, check_whole
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.metric_names import Mode, best_mode
from lightning_feddua.wording import counted

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop

_STATE = ("best_score", "best_round", "wait_count", "stopped_round", "stopping_reason", "stopping_reason_message")


class EarlyStopping(FederatedCallback):
    """Ends the run when a metric stops improving, as Lightning's callback of the same name does over epochs.

    After the fit, ``best_score`` is the best value, ``best_round`` its round, ``wait_count`` how many validated rounds
    in a row have not improved on it, and ``stopped_round`` the last round if the callback has ended the run.

    Args:
        monitor: a name in ``loop.history``; one that training and validation both log means validation's.
        min_delta: an improvement is a change by more than this.
        patience: end the run after so many validated rounds in a row without improvement.
        mode: whether the ``"min"`` or the ``"max"`` is best; None tells by the name, as for ``val_loss``.
        strict: whether a metric that is never logged is an error.
        check_finite: whether to end the run when the metric is NaN or infinite.
        stopping_threshold: end the run as soon as the metric is better than this.
        divergence_threshold: end the run as soon as the metric is worse than this.
        verbose: whether to say so when the metric improves.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Mode | None = None,
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        check_mode(mode)
        check_number("min_delta", min_delta)
        check_whole("patience", patience, least=0)
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = best_mode(monitor, mode)
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self._forget()

    def _forget(self) -> None:
        self.best_score = math.inf if self.mode == "min" else -math.inf
        self.best_round = -1
        self.wait_count = 0
        self.stopped_round: int | None = None
        # Lightning's name for it, and the same in words.
        self.stopping_reason = "NOT_STOPPED"
        self.stopping_reason_message: str | None = None
        self._validated = False

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Start again in a new run."""
        if self.strict:
            check_monitor(loop, self, self.monitor)
        self._validated = False
        if not loop.history:
            self._forget()

    def on_validation_end(self, loop: FederatedLoop, metrics: dict[str, float]) -> None:
        """From now on it is known which metrics there are."""
        self._validated = True

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Compare the round with the best so far; all ranks have the same history, and decide the same."""
        validated, self._validated = self._validated, False
        try:
            value = monitored(loop, self, self.monitor, validated)
        except ConfigurationError:
            if self.strict:
                raise
            return
        if value is None:
            return
        before = self.best_score
        reason = self.decide(value, round)
        if reason is not None:
            self.stopped_round = round
            loop.run.stop_request = reason
        elif self.verbose and self.best_round == round:
            by = f" by {abs(before - value):.4g}" if math.isfinite(before) else ""
            rank_zero_info(f"Round {round}: `{self.monitor}` has improved{by} to {value:.4g}.")

    def decide(self, value: float, round: int) -> str | None:
        """Take the value of a validated round into account, and return why the run should end, if it should.

        Args:
            value: the metric.
            round: the round.
        """
        if self.check_finite and not math.isfinite(value):
            return self._stop("NON_FINITE_METRIC", f"`{self.monitor}` is {value}")
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            return self._stop("STOPPING_THRESHOLD", f"`{self.monitor}` has reached {value:.4g}")
        if self.divergence_threshold is not None and self._better(-value, -self.divergence_threshold):
            return self._stop("DIVERGENCE_THRESHOLD", f"`{self.monitor}` has diverged to {value:.4g}")
        delta = self.min_delta if self.mode == "max" else -self.min_delta
        if self._better(value - delta, self.best_score):
            self.best_score, self.best_round, self.wait_count = value, round, 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        rounds = counted(round - self.best_round, "round")
        return self._stop("PATIENCE_EXHAUSTED", f"`{self.monitor}` has not improved for {rounds}")

    def _stop(self, kind: str, reason: str) -> str:
        self.stopping_reason, self.stopping_reason_message = kind, reason
        return reason

    def _better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other

    def state_dict(self) -> dict[str, Any]:
        """The best round, and how long ago it was."""
        return {"monitor": self.monitor, "mode": self.mode, **{name: getattr(self, name) for name in _STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting, if it is for the same metric."""
        if (state["monitor"], state["mode"]) == (self.monitor, self.mode):
            for name in _STATE:
                setattr(self, name, state[name])
