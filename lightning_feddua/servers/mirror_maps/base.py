"""Mirror maps: the geometry in which the server moves (paper, Section 3)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_feddua.errors import ConfigurationError
from lightning_feddua.servers.mirror_maps.root import increasing_root
from lightning_feddua.vectors import chunks, scalar_dtype


class MirrorMap(ABC):
    """A strictly convex ψ, given by its gradient ∇ψ and by the inverse of that, ∇φ, the gradient of the conjugate.

    Both take and return flat float64 vectors, whatever the precision of the model.

    Example:
        >>> class Entropy(MirrorMap):
        ...     '''ψ(w) = Σ w log w − w, for weights that start and stay positive.'''
        ...
        ...     separable = True
        ...
        ...     def grad_psi(self, w: Tensor) -> Tensor:
        ...         return w.log()
        ...
        ...     def grad_phi(self, theta: Tensor) -> Tensor:
        ...         return theta.exp()
        >>> w = torch.tensor([1.0, 2.0, 3.0])
        >>> line = Entropy().line(w, direction=torch.tensor([1.0, 0.0, -1.0]))
        >>> line.move(math.log(2))
        >>> w
        tensor([2.0000, 2.0000, 1.5000])
    """

    #: Whether each coordinate is mapped by itself. The map then gets vectors in chunks, and nothing of the model's size
    #: is allocated; otherwise it gets whole vectors.
    separable = False

    @abstractmethod
    def grad_psi(self, w: Tensor) -> Tensor:
        """``θ = ∇ψ(w)``, from weights to dual variables."""

    @abstractmethod
    def grad_phi(self, theta: Tensor) -> Tensor:
        """``w = ∇φ(θ)``, from dual variables back to weights."""

    def displacement(self, theta: Tensor, delta: Tensor) -> Tensor:
        """``∇φ(θ + δ) − ∇φ(θ)``.

        Override it where a formula without the difference is known: the step then stays accurate when an update is many
        digits smaller than the weights.
        """
        return self.grad_phi(theta + delta) - self.grad_phi(theta)

    def line(self, weights: Tensor, direction: Tensor) -> DualLine:
        """The curve along which the weights can move in a round."""
        return DualLine(self, weights, direction)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


class DualLine:
    """``w(η) = ∇φ(θ + η v)`` with ``θ = ∇ψ(w)``: a straight line of dual variables, seen from the weights.

    θ is computed from the weights whenever it is needed, in chunks if the map is separable. Nothing of the model's size
    is kept.

    Args:
        mirror_map: the map.
        weights: w, flat.
        direction: v, flat.
    """

    def __init__(self, mirror_map: MirrorMap, weights: Tensor, direction: Tensor) -> None:
        self.mirror_map = mirror_map
        self.weights, self.direction = weights, direction
        self.dtype = scalar_dtype(weights.device)
        self.piece_size = None if mirror_map.separable else max(1, weights.numel())

    def dual(self, w: Tensor) -> Tensor:
        """θ of a piece of the weights."""
        return self.mirror_map.grad_psi(w)

    def primal(self, eta: float) -> Callable[[Tensor], Tensor]:
        """The function that takes a chunk of ``θ + η v`` back to weights."""
        return self.mirror_map.grad_phi

    def h(self, eta: float) -> float:
        """``⟨∇φ(θ + η v) − w, v⟩``, which increases with η from 0."""
        total = torch.zeros((), dtype=self.dtype, device=self.weights.device)
        for _, theta, v in self._pieces():
            total += torch.dot(self.mirror_map.displacement(theta, eta * v), v)
        return total.item()

    def solve(self, m: float, eps_g: float, guess: float) -> float:
        """FedDuA's step: the η with ``h(η) + ε_g η = m``, which for a quadratic ψ is ``m / (‖v‖²_{G⁻¹} + ε_g)``."""
        eta = increasing_root(lambda eta: self.h(eta) + eps_g * eta, m, guess)
        if eta is None:
            self._check_weights()
            raise ConfigurationError(
                f"Under the mirror map `{self.mirror_map}` no step reaches h(η) = m = {m:.3g}: its ∇φ is bounded or"
                " overflows first.",
                "Use a map whose ∇φ takes all values within the range of floats, or give a constant `step_size`.",
            )
        return eta

    def move(self, eta: float) -> None:
        """Move the weights to ``w(η)``, in place: all of them, or none if one would not be finite."""
        primal = self.primal(eta)
        largest = torch.zeros((), dtype=self.dtype, device=self.weights.device)
        for _, theta, v in self._pieces():
            largest = torch.maximum(largest, primal(theta.add(v, alpha=eta)).abs().amax())
        # Written so that NaN fails, too.
        if not largest.item() <= torch.finfo(self.weights.dtype).max:
            self._check_weights()
            raise ConfigurationError(
                f"A step of {eta:.3g} under the mirror map `{self.mirror_map}` takes weights out of the range of"
                f" {str(self.weights.dtype).removeprefix('torch.')}.",
                "Give a smaller `step_size`, or a map whose ∇φ grows more slowly.",
            )
        for w, theta, v in self._pieces():
            w.copy_(primal(theta.add(v, alpha=eta)))

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """``(w, θ, v)``, where w is a window on the weights and the others are float64 copies."""
        for w, v in chunks(self.weights, self.direction, size=self.piece_size):
            # A copy, because a map may work in place.
            yield w, self.dual(w.to(self.dtype, copy=True)), v.to(self.dtype)

    def _check_weights(self) -> None:
        for _, theta, _ in self._pieces():
            if not math.isfinite(theta.sum().item()):
                raise ConfigurationError(
                    f"The mirror map `{self.mirror_map}` has no finite ∇ψ at the present weights.",
                    "Use a map that is defined for all weights, or start from weights inside its domain.",
                )
