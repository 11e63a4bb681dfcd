from torch import Tensor

from lightning_feddua.checks import check_non_negative
from lightning_feddua.clients.local_training import LocalRound, LocalTraining


class FedProx(LocalTraining):
    """Local steps on ``F_i(w) + (μ/2) ‖w − w_t‖²`` (Li et al., 2020).

    Args:
        mu: the strength of the proximal term; 0 is plain local training, bit for bit.
    """

    def __init__(self, mu: float = 0.01) -> None:
        super().__init__()
        check_non_negative("mu", mu, "one, such as 0.01")
        self.mu = mu

    def correct(self, gradient: Tensor, weights: Tensor, local: LocalRound) -> None:
        """``g + μ (w − w_t)``."""
        if self.mu > 0:
            gradient.add_(weights - local.anchor, alpha=self.mu)
