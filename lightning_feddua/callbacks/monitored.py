"""The metric by which rounds are compared."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_feddua.errors import ConfigurationError, choices
from lightning_feddua.lightning_names import is_overridden
from lightning_feddua.metric_names import LAST_ITERATE, LOOP_COLUMNS, Mode

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


def check_mode(mode: Mode | None) -> None:
    """One clear error for a mode that there is not."""
    if mode not in (None, "min", "max"):
        raise ConfigurationError(f"There is no mode `{mode}`.", "Choose `min` or `max`.")


def check_monitor(loop: FederatedLoop, owner: object, monitor: str) -> None:
    """One clear error, before any work, for a metric of validation in a run that does not validate."""
    word = re.match(r"val(id|idation)?(?![a-z])", monitor)
    is_validations = word is not None or monitor.startswith(f"{LAST_ITERATE}/")
    package = __name__.partition(".")[0]
    # What somebody else's callback adds to the history, nobody knows.
    others = any(type(callback).__module__.partition(".")[0] != package for callback in loop.callbacks)
    if is_validations and not others and not _validates(loop):
        reason = "`validate_every=0`" if loop.validate_every == 0 else "there is no validation data, or no step for it"
        raise ConfigurationError(
            f"`{_name(owner)}` monitors `{monitor}`, but nothing is validated: {reason}.",
            "Validate, or monitor a metric of training.",
        )


def monitored(loop: FederatedLoop, owner: object, monitor: str, validated: bool) -> float | None:
    """The metric's value in the round that has just ended; None where it is not validated.

    Args:
        loop: the loop.
        owner: the callback that asks.
        monitor: the metric's name. One that training and validation both log is validation's, as under Trainer.
        validated: whether this round was.

    Raises:
        ConfigurationError: there is no such metric, and there will be none.
    """
    row: Mapping[str, Any] = loop.history[-1]
    if loop.run.columns.is_open(monitor) and _validates(loop):
        return None
    column = column_of(loop, monitor)
    if column in row:
        return float(row[column])
    known = any(column in earlier for earlier in loop.history)
    if known or not (validated or loop.validate_every == 0):
        return None
    there = choices(row.keys() - LOOP_COLUMNS)
    raise ConfigurationError(f"`{_name(owner)}` monitors `{monitor}`, which is not logged.", f"Choose one of {there}.")


def column_of(loop: FederatedLoop, monitor: str) -> str:
    """The column of the history that a monitor means."""
    column = loop.run.columns.meant(monitor)
    plain = re.sub("_(epoch|step)$", "", monitor)
    # Trainer's names of what is logged by step and by epoch; here there is one value for the round.
    row = loop.history[-1]
    return plain if plain != monitor and column not in row and plain in row else column


def kept_with(scores: Mapping[str, float], name: str, score: float, places: int) -> dict[str, float]:
    """The files that are kept after a round has entered the competition, the oldest first.

    Args:
        scores: of the files so far, the smaller the better.
        name: the round's file.
        score: its score.
        places: how many files may be kept; -1 for all.
    """
    score = math.inf if math.isnan(score) else score
    kept = {file: value for file, value in scores.items() if file != name}
    if 0 <= places <= len(kept):
        # As in Lightning: a new file must be better than the worst, of which the oldest goes.
        worst = max(kept, key=lambda file: kept[file], default=None)
        if worst is None or score >= kept[worst]:
            return kept
        del kept[worst]
    return {**kept, name: score}


def _name(owner: object) -> str:
    """The class of a callback, as the user knows it."""
    return type(getattr(owner, "callback", owner)).__name__


def _validates(loop: FederatedLoop) -> bool:
    """Whether the run validates."""
    federation = loop._federation
    assert federation is not None
    if loop.validate_every == 0 or loop.limit_val_batches == 0:
        return False
    data = federation.datamodule.evaluation_data("validation")
    return bool(data) and is_overridden("validation_step", federation.module)
