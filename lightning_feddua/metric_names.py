"""What the name of a metric tells: who writes it, and whether larger is better."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Mode = Literal["min", "max"]

# Columns of a round's row that the loop writes: counts, and what tells how a round went. Neither is a method's result.
BOOKKEEPING = frozenset({"round", "clients", "skipped_clients"})
DIAGNOSTICS = frozenset({"eta_g", "heterogeneity", "seconds"})
LOOP_COLUMNS = BOOKKEEPING | DIAGNOSTICS
# Prefix of the metrics of w_{t+1}, where the plain names are those of the averaged iterate.
LAST_ITERATE = "last_iterate"
# Prefix of a validation metric whose name training logs, too.
VALIDATION = "val"

_LARGE_IS_WORSE = frozenset({
    *("loss", "losses", "error", "errors", "err", "cost", "risk", "regret", "deviance", "residual", "residuals"),
    *("mse", "rmse", "nrmse", "msle", "rmsle", "mae", "medae", "mape", "smape", "wape", "mase", "mre", "crps"),
    *("nll", "ce", "bce", "xent", "entropy", "crossentropy", "logloss", "hinge", "kl", "kld", "divergence"),
    *("ppl", "perplexity", "bpc", "bpd", "wer", "cer", "ter", "eer", "fpr", "fnr"),
    *("ece", "mce", "brier", "fid", "lpips", "hausdorff", "distance"),
})  # fmt: skip


def large_is_worse(name: str) -> bool:
    """Whether a metric is better the smaller it is, as far as the words in its name tell.

    A whole word such as ``loss``, ``error``, ``mse`` or ``perplexity`` says so. ``neg`` says the opposite.

    >>> large_is_worse("val_loss"), large_is_worse("valMSE"), large_is_worse("val_cancer_acc")
    (True, True, False)
    >>> large_is_worse("neg_mean_squared_error"), large_is_worse("neg_log_likelihood")
    (False, True)
    """
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return ("neg" in words) != bool(words & _LARGE_IS_WORSE)


def best_mode(name: str, mode: Mode | None = None) -> Mode:
    """Whether the ``"min"`` or the ``"max"`` of a metric is best: what was asked for, or else what its name tells."""
    return mode or ("min" if large_is_worse(name) else "max")


def direction(name: str, mode: Mode | None = None) -> str:
    """The same for people.

    >>> direction("val_loss"), direction("val_power", "min")
    ('val_loss, smaller is better', 'val_power, smaller is better')
    """
    return f"{name}, {'smaller' if best_mode(name, mode) == 'min' else 'larger'} is better"


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
