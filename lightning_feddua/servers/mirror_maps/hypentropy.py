from torch import Tensor

from lightning_feddua.checks import check_positive
from lightning_feddua.servers.mirror_maps.base import MirrorMap


class Hypentropy(MirrorMap):
    """The hyperbolic entropy (Ghai, Hazan and Singer, 2020), between gradient descent and exponentiated gradients.

    Weights much smaller than β move by what is added to them, larger ones in proportion to their size.

    Args:
        beta: where the one turns into the other.

    Example:
        >>> import torch
        >>> theta = Hypentropy(beta=0.1).grad_psi(torch.tensor([0.0, 0.1, 10.0]))
        >>> Hypentropy(beta=0.1).grad_phi(theta + 0.01)
        tensor([1.0000e-03, 1.0142e-01, 1.0101e+01])
    """

    separable = True

    def __init__(self, beta: float = 1.0) -> None:
        check_positive("beta", beta, finite=True)
        self.beta = beta

    def grad_psi(self, w: Tensor) -> Tensor:
        """``asinh(w / β)``."""
        return w.div(self.beta).asinh_()

    def grad_phi(self, theta: Tensor) -> Tensor:
        """``β sinh(θ)``."""
        return theta.sinh().mul_(self.beta)

    def displacement(self, theta: Tensor, delta: Tensor) -> Tensor:
        """``β (sinh(θ + δ) − sinh(θ)) = 2β cosh(θ + δ/2) sinh(δ/2)``."""
        half = delta / 2
        return (theta + half).cosh_().mul_(half.sinh_()).mul_(2 * self.beta)
