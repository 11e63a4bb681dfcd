"""FedDuA's server (Doubly Adaptive Federated Learning, arXiv 2505.11126, Algorithm 1) and the family around it.

Every rule is one update, ``w ← w + η G⁻¹ v``, with three independent choices: the direction ``v`` (the mean update
``Δ̄``, or its momentum), the preconditioner ``G = √s + ε`` (identity, Adagrad, Adam, Yogi), and the step ``η`` (a
constant, or FedDuA's ``η = m / (‖v‖²_{G⁻¹} + ε_g)`` with ``m = ½ mean ‖Δ_i‖²``).

That is mirror descent, ``w ← ∇φ(∇ψ(w) + η v)``, with ``ψ(x) = ½ xᵀ G x``. Any other mirror map takes the place of G,
and FedDuA's step is then ``η = h⁻¹(m)`` with ``h(η) = ⟨∇φ(∇ψ(w) + η v) − w, v⟩``.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.checks import check_choice, check_decay, check_instance, check_non_negative
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.servers.base import Server
from lightning_feddua.servers.mirror_maps import MirrorMap
from lightning_feddua.servers.mirror_maps.base import DualLine
from lightning_feddua.servers.passes import Passes
from lightning_feddua.servers.preconditioners import PRECONDITIONERS
from lightning_feddua.vectors import Scratch, scalar_dtype

if TYPE_CHECKING:
    from lightning_feddua.host.parameters import ParameterLayout


class FedDuAServer(Server):
    """The whole family of server rules; the named rules fix its choices.

    Args:
        preconditioner: ``"identity"``, ``"adagrad"``, ``"adam"`` or ``"yogi"``. By default Adagrad, or the identity
            where there is a mirror map.
        step_size: ``"adaptive"`` for FedDuA's step, or a constant global learning rate η_g.
        beta1: momentum of the direction; 0 for none.
        beta2: memory of the Adam and Yogi accumulators.
        eps: added to √s, for stability. With 0, coordinates that have never moved stay where they are.
        eps_g: added to the denominator of the adaptive step, for stability.
        min_step: lower bound of the adaptive step (FedExP's original paper has 1.0); identity preconditioner only.
        heavy_ball: accumulate the direction undamped, ``v = β₁ v + Δ̄``; constant steps only.
        bias_correction: divide v, s and m by their missing mass in early rounds, as the original Adam does.
        initial_accumulator: the value of s before the first round.
        mirror_map: the geometry to move in, such as :class:`PNorm`; None for the preconditioner's. With the adaptive
            step, ``h(η) + ε_g η = m`` is solved for η.

    Example:
        >>> server = FedDuAServer("identity")
        >>> weights = torch.zeros(2, dtype=torch.float64)
        >>> deltas = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> server.step(weights, RoundUpdate(deltas.mean(0), deltas.square().sum(1)))
        1.0
        >>> weights
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    def __init__(
        self,
        preconditioner: Literal["identity", "adagrad", "adam", "yogi"] | None = None,
        step_size: Literal["adaptive"] | float = "adaptive",
        beta1: float = 0.0,
        beta2: float = 0.99,
        eps: float = 1e-9,
        eps_g: float = 0.0,
        min_step: float | None = None,
        heavy_ball: bool = False,
        bias_correction: bool = False,
        initial_accumulator: float = 0.0,
        mirror_map: MirrorMap | None = None,
    ) -> None:
        if mirror_map is not None:
            check_instance("mirror map", mirror_map, MirrorMap)
        if preconditioner is None:
            preconditioner = "adagrad" if mirror_map is None else "identity"
        check_choice("preconditioner", preconditioner, PRECONDITIONERS)
        if step_size != "adaptive" and (not isinstance(step_size, Real) or not step_size > 0):
            raise ConfigurationError(
                f"The step size `{step_size}` is neither `adaptive` nor positive.", "Give one of the two."
            )
        check_decay("beta1", beta1)
        check_decay("beta2", beta2)
        check_non_negative("eps", eps)
        check_non_negative("eps_g", eps_g)
        check_non_negative("initial_accumulator", initial_accumulator)
        if mirror_map is not None and preconditioner != "identity":
            raise ConfigurationError(
                f"`preconditioner={preconditioner}` was given along with the mirror map `{mirror_map}`.",
                "Leave one of the two out: a preconditioner is itself a mirror map.",
            )
        if min_step is not None:
            check_non_negative("min_step", min_step)
        if min_step is not None and (mirror_map is not None or preconditioner != "identity" or step_size != "adaptive"):
            raise ConfigurationError(
                f"`min_step={min_step}` was given for a rule that is not FedExP's.",
                "Leave it out: under a preconditioner or a mirror map the step has other units.",
            )
        if heavy_ball and step_size == "adaptive":
            raise ConfigurationError(
                "`heavy_ball=True` was given with the adaptive step, whose guarantee needs the damped direction.",
                "Leave it out, or give a constant `step_size`.",
            )
        self.preconditioner = preconditioner
        self.step_size = step_size
        self.beta1, self.beta2 = beta1, beta2
        self.eps, self.eps_g = eps, eps_g
        self.min_step = min_step
        self.heavy_ball = heavy_ball
        self.bias_correction = bias_correction
        self.initial_accumulator = initial_accumulator
        self.mirror_map = mirror_map
        self._accumulate = PRECONDITIONERS[preconditioner]
        self._scratch = Scratch()
        self._passes = Passes(self._moments, self._move)
        self.reset()

    def reset(self) -> None:
        """Forget all rounds."""
        self._s: Tensor | None = None
        self._v: Tensor | None = None
        self._m = 0.0
        self._rounds = 0

    def set_up(self, layout: ParameterLayout, compile: bool = False) -> None:
        """Start a fit. Whether the step is compiled is decided anew for each."""
        super().set_up(layout, compile)
        self._passes.set_up(compile)

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        """Whether the step is set from the data; the average of the last two iterates is then evaluated."""
        return self.step_size == "adaptive"

    @property
    def mean_step(self) -> float | None:  # type: ignore[override]
        """η where the rule is ``w += η Δ̄``. A subclass with a step of its own may declare it; it is not inherited."""
        steps = (self.step, FedDuAServer.step), (self.on_aggregate_end, FedDuAServer.on_aggregate_end)
        inherited = all(getattr(own, "__func__", None) is known for own, known in steps)
        along_mean = self.preconditioner == "identity" and self.mirror_map is None and self.beta1 == 0
        return float(self.step_size) if inherited and along_mean and not isinstance(self.step_size, str) else None

    @property
    def coordinate_adaptive(self) -> bool:  # type: ignore[override]
        """Whether each coordinate's step depends on its own past updates; a mirror map is fixed."""
        return self._accumulate is not None

    @property
    def client_adaptive(self) -> bool:  # type: ignore[override]
        """Whether the step depends on how much clients differ."""
        return self.adaptive

    @torch.no_grad()
    def step(self, weights: Tensor, update: RoundUpdate) -> float:
        """Move the weights, in place; return η, or 0 where the direction vanishes, and then the weights stay."""
        self._prepare(weights, update)
        self._rounds += 1
        self._m = self.beta1 / 2 * self._m + (1 - self.beta1) * update.half_mean_squared_norm()
        # Where there is memory to keep G⁻¹ v in, it is not computed again for the move. Compiled, that takes less time
        # than to write and read it.
        keeps = self._s is not None and self._needs_norm and not self._passes.compiled
        kept = update.spare if keeps else None
        squared_norm = self._passes.moments(update.mean_delta, self._v, self._s, self._s_scale, kept)
        direction = update.mean_delta if self._v is None else self._v
        line = None if self.mirror_map is None else self.mirror_map.line(weights, direction)
        if line is None:
            eta = self._eta(squared_norm, largest=torch.finfo(weights.dtype).max)
        else:
            eta = self._mirror_eta(line, squared_norm)
        if eta == 0:
            rank_zero_warn(
                f"{type(self).__name__}: a round's update vanished, so the weights stay. The log has `eta_g` = 0 there."
            )
            return 0.0
        scale = eta * self._bias_correction(self.beta1)
        if line is None:
            direction, s = (direction, self._s) if kept is None else (kept, None)
            self._passes.move(weights, direction, s, scale, self._s_scale)
        elif math.isfinite(eta):
            # An update that is not finite shows as η = NaN, and moves nothing.
            line.move(scale)
        return eta

    def _prepare(self, weights: Tensor, update: RoundUpdate) -> None:
        if update.mean_delta.shape != weights.shape or weights.dim() != 1:
            raise ValueError(
                f"The mean update has shape {tuple(update.mean_delta.shape)} and the weights {tuple(weights.shape)}."
                " Both must be the same flat vector."
            )
        if self._s is None and self._accumulate is not None:
            self._s = torch.full_like(weights, self.initial_accumulator)
        if self._v is None and self.beta1 > 0:
            self._v = torch.zeros_like(weights)
        # A loaded state may come from another device.
        self._s = None if self._s is None else self._s.to(weights)
        self._v = None if self._v is None else self._v.to(weights)
        self._passes.prepare(weights, update.mean_delta, self._v, self._s)

    @property
    def _needs_norm(self) -> bool:
        return self.adaptive or self.mirror_map is not None

    def _moments(
        self, delta: Tensor, v: Tensor | None, s: Tensor | None, s_scale: float | Tensor, kept: Tensor | None = None
    ) -> Tensor | None:
        """Update v and s, for a part of the vectors; return its part of ``‖v‖²_{G⁻¹}``, if needed.

        ``G⁻¹ v`` is left in ``kept``, if given.
        """
        if v is not None:
            v.mul_(self.beta1).add_(delta, alpha=1.0 if self.heavy_ball else 1 - self.beta1)
        if s is not None and self._accumulate is not None:
            self._accumulate(s, delta, self.beta2, self._scratch)
        if not self._needs_norm:
            return None
        direction = delta if v is None else v
        step = self._precondition(direction, s, s_scale, kept)
        dtype = scalar_dtype(delta.device)
        first = self._scratch.cast("direction", direction, dtype)
        second = first if step is direction else self._scratch.cast("step", step, dtype)
        # A compiler makes one pass of a product and its sum, but calls a library for `dot`.
        return (first * second).sum() if torch.compiler.is_compiling() else torch.dot(first, second)

    def _move(self, w: Tensor, v: Tensor, s: Tensor | None, scale: float | Tensor, s_scale: float | Tensor) -> None:
        """``w += η G⁻¹ v``, for a part of the vectors."""
        step = self._precondition(v, s, s_scale)
        w.add_(step * scale) if isinstance(scale, Tensor) else w.add_(step, alpha=scale)

    def _eta(self, squared_norm: Tensor | None, largest: float) -> float:
        """``m / (‖v‖²_{G⁻¹} + ε_g)``, or the constant."""
        if not isinstance(self.step_size, str):
            return float(self.step_size)
        assert squared_norm is not None
        correction = self._bias_correction(self.beta1)
        norm = correction**2 * squared_norm.item()
        # Written so that a direction that vanishes or underflows gives 0, and NaN passes through to be seen.
        eta = correction * self._m / (norm + self.eps_g) if norm != 0 else 0.0
        if self.min_step is not None and eta > 0:
            eta = max(eta, self.min_step)
        return 0.0 if eta > largest else eta

    def _mirror_eta(self, line: DualLine, squared_norm: Tensor | None) -> float:
        """The root of ``h(η) + ε_g η = m``, or the constant."""
        assert squared_norm is not None
        norm = squared_norm.item()
        if not math.isfinite(norm) or not math.isfinite(self._m):
            return math.nan
        if not isinstance(self.step_size, str):
            return float(self.step_size)
        if norm == 0 or self._m == 0:
            return 0.0
        # The corrected direction and m are `correction` times v and m, so the root is η · correction.
        correction = self._bias_correction(self.beta1)
        eps_g = self.eps_g / correction**2
        return line.solve(self._m, eps_g, guess=self._m / (norm + eps_g)) / correction

    @property
    def _s_scale(self) -> float:
        """What √s is multiplied by."""
        return 1.0 if self.preconditioner == "adagrad" else self._bias_correction(self.beta2) ** 0.5

    def _precondition(self, v: Tensor, s: Tensor | None, s_scale: float | Tensor, out: Tensor | None = None) -> Tensor:
        """``G⁻¹ v`` for one chunk; 0 where G is 0, because a coordinate has never moved or by underflow."""
        if s is None:
            return v
        scale = torch.sqrt(s, out=self._scratch.empty("scale", s) if out is None else out)
        if self.bias_correction:
            scale.mul_(s_scale)
        if self.eps > 0:
            scale.add_(self.eps)
        else:
            scale.masked_fill_(scale == 0, float("inf"))
        return torch.div(v, scale, out=scale)

    def _bias_correction(self, beta: float) -> float:
        return 1 / (1 - beta**self._rounds) if self.bias_correction and not self.heavy_ball else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Everything the next round depends on, as tensors and numbers."""
        vectors = {name: vector for name, vector in (("s", self._s), ("v", self._v)) if vector is not None}
        return {"rule": type(self).__name__, "m": self._m, "rounds": self._rounds, **vectors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another server of the same rule."""
        if state["rule"] != type(self).__name__:
            raise ConfigurationError(
                f"The saved server state belongs to `{state['rule']}`, and this is `{type(self).__name__}`.",
                "Resume with the same server rule, or start afresh.",
            )
        kept = {name for name, is_kept in (("s", self._accumulate), ("v", self.beta1)) if is_kept}
        if state["rounds"] and {"s", "v"} & {*state} != kept:
            raise ValueError("a vector of the server is missing, or one too many is there")
        self._s = None if "s" not in state else state["s"].clone()
        self._v = None if "v" not in state else state["v"].clone()
        self._m = float(state["m"])
        self._rounds = int(state["rounds"])
