"""What the name of a metric tells: who writes it, and whether larger is better."""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

Mode = Literal["min", "max"]
T = TypeVar("T")

# Columns of a round's row that the loop writes: counts, and what tells how a round went. Neither is a method's result.
CERTIFICATE = "certificate"
BOOKKEEPING = frozenset({"round", "clients", "skipped_clients", CERTIFICATE})
DIAGNOSTICS = frozenset({"eta_g", "heterogeneity", "seconds"})
LOOP_COLUMNS = BOOKKEEPING | DIAGNOSTICS
# The loss that every client returns has a column of its own.
LOSS = "loss"
# Prefix of the metrics of w_{t+1}, where the plain names are those of the averaged iterate.
LAST_ITERATE = "last_iterate"
# Prefixes of a metric whose name the other of training and validation has taken.
VALIDATION = "val"
TRAINING = "train"

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


class ColumnOwners:
    """Which columns are training's and which are validation's: each keeps its meaning for a whole run.

    A name that both log, as many modules do with ``loss`` and ``acc``, is training's, and validation's is ``val/acc``.
    Where validation has logged a name for rounds before training does, training's becomes ``train/acc``.
    """

    def __init__(self) -> None:
        # Every client's loss is logged under this name, also where none finished the first round.
        self._training = {LOSS}
        self._validation: set[str] = set()
        # Columns of validation's that are not named as it has logged them.
        self.renamed: dict[str, str] = {}

    def training(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Training metrics under names of their own."""
        return _renamed(metrics, TRAINING, self._training, self._validation)

    def validation(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Validation metrics under names of their own."""
        renamed = _renamed(metrics, VALIDATION, self._validation, self._training)
        self.renamed |= {name: column for name, column in zip(metrics, renamed, strict=True) if name != column}
        return renamed

    def as_columns(self, metrics: Mapping[str, T]) -> dict[str, T]:
        """Validation metrics under the names that :meth:`validation` would give them."""
        return _renamed(metrics, VALIDATION, set(self._validation), self._training)

    def meant(self, name: str) -> str:
        """The column that a monitor means: validation's, where training logs the same name, as under Trainer."""
        iterate = f"{LAST_ITERATE}/" if name.startswith(f"{LAST_ITERATE}/") else ""
        name = name.removeprefix(iterate)
        return iterate + self.renamed.get(name, name)

    def is_open(self, name: str) -> bool:
        """Whether training logs a name, and nobody knows yet whether validation does."""
        return name in self._training and not self._validation

    def state_dict(self) -> dict[str, Any]:
        """Whose each name is."""
        own = {"training": sorted(self._training), "validation": sorted(self._validation)}
        return {**own, "renamed": dict(self.renamed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the names given so far."""
        self._training, self._validation = set(state["training"]), set(state["validation"])
        self.renamed = dict(state.get("renamed", {}))


def _renamed(metrics: Mapping[str, T], prefix: str, own: set[str], others: set[str]) -> dict[str, T]:
    renamed = {}
    for name, value in metrics.items():
        column = name
        while column in others or (column != name and column in metrics):
            column = f"{prefix}/{column}"
        renamed[column] = value
    own.update(renamed)
    return renamed
