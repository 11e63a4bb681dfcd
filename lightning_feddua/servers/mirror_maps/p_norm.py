from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_feddua.errors import ConfigurationError
from lightning_feddua.servers.mirror_maps.base import DualLine, MirrorMap
from lightning_feddua.vectors import chunks


class PNorm(MirrorMap):
    """``ψ(w) = ½ ‖w‖_p²``, whose conjugate is ``φ(θ) = ½ ‖θ‖_q²`` with ``1/p + 1/q = 1``.

    With p = 2 it is the identity; towards 1 it favours few large weights over many small ones. Very near 1 a weight
    whose dual variable is small underflows to 0, and its dual variable is lost. In float32, stay above 1.05.

    Args:
        p: more than 1 and at most 2.

    Example:
        >>> PNorm(1.5).grad_psi(torch.tensor([1.0, 4.0]))
        tensor([2.0801, 4.1602])
        >>> PNorm(1.5).grad_phi(torch.tensor([2.0801, 4.1602]))
        tensor([1.0000, 4.0000])
    """

    def __init__(self, p: float = 1.5) -> None:
        if not 1 < p <= 2:
            raise ConfigurationError(f"`p={p}` lies outside (1, 2].", "Choose a value inside, such as 1.5.")
        self.p = p

    @property
    def q(self) -> float:
        """The conjugate exponent."""
        return self.p / (self.p - 1)

    def grad_psi(self, w: Tensor) -> Tensor:
        """``‖w‖_p^(2−p) sign(w) |w|^(p−1)``."""
        return _NormGradient(self.p, lambda: [w])(w)

    def grad_phi(self, theta: Tensor) -> Tensor:
        """``‖θ‖_q^(2−q) sign(θ) |θ|^(q−1)``."""
        return _NormGradient(self.q, lambda: [theta])(theta)

    def line(self, weights: Tensor, direction: Tensor) -> DualLine:
        """Norms are scalars: once they are known, this map works in chunks, too."""
        return _PNormLine(self, weights, direction)


class _NormGradient:
    """``∇ ½‖x‖_r²`` for the pieces of a vector, whose norm is taken at once.

    Powers are those of entries over the largest one, so that they overflow for no r.

    Args:
        r: the exponent.
        pieces: goes over all pieces of x, as often as it is called.
    """

    def __init__(self, r: float, pieces: Callable[[], Iterable[Tensor]]) -> None:
        self.r = r
        self.largest = torch.stack([torch.linalg.vector_norm(x, math.inf) for x in pieces()]).amax().item()
        # Those of a zero vector, whose gradient is 0.
        self.norm = self.factor = 0.0
        if self.largest != 0:
            total = torch.stack([(x / self.largest).abs_().pow_(r).sum() for x in pieces()]).sum().item()
            self.norm = self.largest * total ** (1 / r)
            self.factor = self.largest * total ** (2 / r - 1)

    def __call__(self, x: Tensor) -> Tensor:
        return _signed_power(x / (self.largest or 1.0), self.r - 1).mul_(self.factor)


class _PNormLine(DualLine):
    """The line in chunks. Each h takes one pass near θ and three far from it."""

    mirror_map: PNorm

    def __init__(self, mirror_map: PNorm, weights: Tensor, direction: Tensor) -> None:
        super().__init__(mirror_map, weights, direction)
        self.piece_size = None
        self._grad_psi = _NormGradient(mirror_map.p, lambda: (w.to(self.dtype) for (w,) in chunks(weights)))
        pairs = ((w.to(self.dtype), v.to(self.dtype)) for w, v in chunks(weights, direction))
        self._w_along_v = torch.stack([torch.dot(w, v) for w, v in pairs]).sum().item()

    def dual(self, w: Tensor) -> Tensor:
        return self._grad_psi(w)

    def primal(self, eta: float) -> _NormGradient:
        return _NormGradient(self.mirror_map.q, lambda: (theta.add(v, alpha=eta) for _, theta, v in self._pieces()))

    def h(self, eta: float) -> float:
        """Near θ without differences of nearly equal numbers, which takes one pass; elsewhere as it is defined.

        With ``N = ‖w‖_p = ‖θ‖_q``, ``t = θ/N``, ``P = sign(t) |t|^(q−1) = w/N``, and C the change of P when t moves by
        ``δ = η v / N``: ``‖t + δ‖_q^q = 1 + b`` with ``b = Σ δ (P + C) + t C``, and the weights move by
        ``N ((1 + b)^e (P + C) − P)`` with ``e = 2/q − 1``.
        """
        norm, q = self._grad_psi.norm, self.mirror_map.q
        if norm > 0:
            sums = torch.zeros(2, dtype=self.dtype, device=self.weights.device)
            for w, theta, v in self._pieces():
                t, delta, power = theta.div_(norm), v * (eta / norm), w.to(self.dtype) / norm
                change = _signed_power_change(t, delta, power, q - 1)
                sums += torch.stack([torch.dot(delta, power + change) + torch.dot(t, change), torch.dot(change, v)])
            b, change_along_v = sums.tolist()
            if abs(b) <= 0.5:
                e = 2 / q - 1
                return norm * (1 + b) ** e * change_along_v + math.expm1(e * math.log1p(b)) * self._w_along_v
        primal = self.primal(eta)
        total = torch.zeros((), dtype=self.dtype, device=self.weights.device)
        for _, theta, v in self._pieces():
            total += torch.dot(primal(theta.add(v, alpha=eta)), v)
        return total.item() - self._w_along_v


def _signed_power(x: Tensor, exponent: float) -> Tensor:
    return x.abs().pow_(exponent).copysign_(x)


def _signed_power_change(t: Tensor, delta: Tensor, power: Tensor, exponent: float) -> Tensor:
    """``sign(t + δ) |t + δ|^r − P`` with ``P = sign(t) |t|^r``, accurate for small δ, too."""
    relative = delta / t
    near = torch.log1p(relative).mul_(exponent).expm1_().mul_(power)
    return torch.where(relative.abs() <= 0.5, near, _signed_power(t + delta, exponent) - power)
