import torch
from torch import Tensor

from lightning_feddua.errors import ConfigurationError
from lightning_feddua.models.linear import LinearRegression


class SparseLinearRegression(LinearRegression):
    """Least squares that tells, in validation, how well its weights find the support of the data module's ``w*``.

    Besides ``val_loss`` it logs ``nonzeros``, the ``precision``, ``recall`` and ``f1`` of the support, and
    ``weight_error``, which is ``‖w − w*‖ / ‖w*‖``.

    Args:
        dim: the number of inputs.
        lr: the local learning rate η_l.
        threshold: weights of at most this size count as zero. 0 is for methods that give exact zeros.
    """

    def __init__(self, dim: int = 400, lr: float = 0.02, threshold: float = 0.0) -> None:
        super().__init__(dim, lr)
        self.threshold = threshold

    def setup(self, stage: str) -> None:
        """Find ``w*``."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self._true_weights: Tensor | None = getattr(data, "true_weights", None)
        if self._true_weights is None or self._true_weights.numel() != self.linear.weight.numel():
            raise ConfigurationError(
                f"A `{type(data).__name__}` has no `true_weights` of {self.linear.weight.numel()} elements.",
                "Use a `SparseRegression` of the same `dim`, or the model `LinearRegression`.",
            )

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss, and what is known of the support."""
        super().validation_step(batch, batch_idx)
        assert self._true_weights is not None
        w = self.linear.weight.detach().flatten()
        w_star = self._true_weights.to(w)
        found, true = w.abs() > self.threshold, w_star != 0
        hits = (found & true).sum()
        self.log("nonzeros", found.sum().float())
        # 0 where nothing was found.
        self.log("precision", hits / found.sum().clamp(min=1))
        self.log("recall", hits / true.sum())
        self.log("f1", 2 * hits / (found.sum() + true.sum()))
        self.log("weight_error", torch.dist(w, w_star) / w_star.norm())
