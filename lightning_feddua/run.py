"""What a run has come to: the part of a loop that checkpoints save and callbacks read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.aggregation.workspace import Workspace
from lightning_feddua.callbacks.update_changes import UpdateChanges
from lightning_feddua.history import HistoryText
from lightning_feddua.metric_names import ColumnOwners

_BORROWER = "the average of the last two iterates"


@dataclass
class Run:
    """The state of one fit between two rounds.

    Args:
        folder: where its results go; before the first round, where runs are kept.
        weights: the global weights ``w_t``, flat; None before a fit.
        average: ``(w_t + w_{t-1})/2`` where the step is adaptive; None while a cohort trains, and for other rules.
        history: one row for each finished round.
        certificates: what stands for the state after each of them, and how it came about; empty for rounds of a
            version without certificates.
        round: the current round, from 0.
        eta_g: the server's last step.
        stop_request: why this rank wants the run to end after this round, if it does.
        stop_reason: why it does end after this round, if it does; the same on every rank.
        stop_signal: the signal by which it was ended, if any; the same on every rank.
        workspace: lends the average its memory.
        columns: whose each name in the history is.
        update_changes: which callbacks change updates.
        is_whole: whether it is still that of the last round's end: until the server's step of the next.
        unsaved: files that could not be written when they last should have been, with the reason; on rank 0.
        history_text: the history as checkpoints have it.
    """

    folder: Path
    weights: Tensor | None = None
    average: Tensor | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    certificates: list[str] = field(default_factory=list)
    round: int = 0
    eta_g: float = 0.0
    stop_request: str | None = None
    stop_reason: str | None = None
    stop_signal: int | None = None
    workspace: Workspace | None = None
    columns: ColumnOwners = field(default_factory=ColumnOwners)
    update_changes: UpdateChanges = field(default_factory=UpdateChanges)
    is_whole: bool = False
    unsaved: dict[str, str] = field(default_factory=dict)
    history_text: HistoryText = field(default_factory=HistoryText)

    @property
    def known_weights(self) -> Tensor:
        """The weights, in a fit."""
        assert self.weights is not None
        return self.weights

    @property
    def evaluated(self) -> Tensor | None:
        """The iterate that is validated: the average where there is one, or else the weights."""
        return self.weights if self.average is None else self.average

    def start_average(self) -> None:
        """Begin an average with the weights as they are."""
        assert self.workspace is not None
        if self.average is None:
            self.average = self.workspace.lend(_BORROWER)
        self.average.copy_(self.known_weights)

    def recover(self, averages: bool) -> None:
        """After a failure while a cohort trained, which has no average: that of the weights alone, if there is one."""
        if averages and self.workspace is not None and self.average is None:
            self.workspace.reclaim()
            self.start_average()

    def row_of(self, update: RoundUpdate, skipped: int | None = None) -> dict[str, Any]:
        """The row of the current round, as far as training and the server's step are concerned.

        Args:
            update: the round's update.
            skipped: how many clients failed and were left out, where that is allowed.
        """
        row = {
            "round": self.round,
            "eta_g": self.eta_g,
            "clients": update.clients,
            "heterogeneity": update.heterogeneity(),
            **self.columns.training(update.metrics),
        }
        if not all(map(math.isfinite, (self.eta_g, *update.metrics.values()))):
            rank_zero_warn(
                f"Round {self.round}: the update or a training metric is not finite, and later rounds will hardly"
                " recover. Try a smaller local learning rate, or `gradient_clip_val`."
            )
        return row if skipped is None else {**row, "skipped_clients": skipped}

    def drop_average(self) -> None:
        """Give the memory of the average to whoever needs it while a cohort trains."""
        self.average = None
        if self.workspace is not None:
            self.workspace.give_back(_BORROWER)

    def state_dict(self) -> dict[str, Any]:
        """Everything but where it is and what it computes in, as tensors and plain values."""
        return {
            "weights": self.weights,
            "average": self.average,
            "history": self.history,
            # One string: a list would cost more with every round.
            "certificates": "\n".join(self.certificates),
            "round": self.round,
            "eta_g": self.eta_g,
            "columns": self.columns.state_dict(),
            "update_changes": self.update_changes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, tensors into memory that is there."""
        self.weights = _into(self.weights, state["weights"])
        if state["average"] is not None and self.workspace is not None:
            self.start_average()
        self.average = _into(self.average, state["average"])
        self.history = state["history"]
        # A checkpoint of an earlier version has none.
        known = state.get("certificates", "\n" * (len(self.history) - 1))
        self.certificates = known.split("\n") if self.history else []
        if len(self.certificates) != len(self.history):
            raise ValueError(f"it has {len(self.certificates)} certificates of {len(self.history)} rounds")
        self.round = state.get("round", len(self.history))
        self.eta_g = state.get("eta_g", 0.0)
        if "columns" in state:
            self.columns.load_state_dict(state["columns"])


def _into(known: Tensor | None, saved: Tensor | None) -> Tensor | None:
    return saved if known is None or saved is None else known.copy_(saved)
