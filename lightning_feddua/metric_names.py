"""Names of the numbers that a run logs."""

from collections.abc import Mapping, Sequence
from typing import Any

# Prefix of the metrics of w_{t+1}, where the plain names are those of the averaged iterate.
LAST_ITERATE = "last_iterate"
# Prefix of a validation metric whose name training logs, too.
VALIDATION = "val"


def validation_names(
    metrics: Mapping[str, float], training: Mapping[str, float], history: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Validation metrics under names of their own: one that training logs too, as ``loss`` is, becomes ``val/loss``.

    Args:
        metrics: of validation.
        training: of the round's training.
        history: earlier rounds, in which a name may have been given already.
    """
    return {_own_name(name, training, history): value for name, value in metrics.items()}


def _own_name(name: str, training: Mapping[str, float], history: Sequence[Mapping[str, Any]]) -> str:
    own = f"{VALIDATION}/{name}"
    before: Mapping[str, Any] = next((row for row in reversed(history) if own in row or name in row), {})
    return own if name in training or own in before else name
