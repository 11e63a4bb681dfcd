"""The two passes of a server step over its vectors, chunk by chunk or compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_feddua.servers.kernels import ServerKernels
from lightning_feddua.vectors import chunk_size, chunks, scalar_dtype

# From how many parameters on a compiled step pays.
COMPILED_SERVER_SIZE = 1 << 20


class Passes:
    """Runs a rule's arithmetic, which is written for parts of vectors, over whole vectors.

    Args:
        moments: ``(Δ̄, v, s, s_scale, kept)``: updates v and s, leaves ``G⁻¹ v`` in ``kept``, if given, and returns
            ``‖v‖²_{G⁻¹}``, or None where the rule does not need it. √s is multiplied by ``s_scale``.
        move: ``(w, v, s, scale, s_scale)``: moves the weights by ``scale`` times ``G⁻¹ v``.
    """

    def __init__(self, moments: Callable[..., Tensor | None], move: Callable[..., None]) -> None:
        self._moments, self._move = moments, move
        self._kernels: ServerKernels | None = None
        self._compile = False

    def set_up(self, compile: bool) -> None:
        """Start a fit: what an earlier one compiled is dropped."""
        self._kernels, self._compile = None, compile

    def prepare(self, weights: Tensor, mean_delta: Tensor, v: Tensor | None, s: Tensor | None) -> None:
        """Compile the passes, if that was asked for and pays. If it fails, a warning says so; it is tried once."""
        if self._compile and self._kernels is None and weights.numel() >= COMPILED_SERVER_SIZE:
            kernels = ServerKernels(self._moments, self._move)
            self._compile = kernels.compile(weights, mean_delta, v, s)
            self._kernels = kernels if self._compile else None

    @property
    def compiled(self) -> bool:
        """Whether the passes run compiled."""
        return self._kernels is not None

    def moments(
        self, mean_delta: Tensor, v: Tensor | None, s: Tensor | None, s_scale: float, kept: Tensor | None
    ) -> Tensor | None:
        """The first pass; ``‖v‖²_{G⁻¹}`` is accumulated in float64."""
        if self._kernels is not None:
            return self._kernels.moments(mean_delta, v, s, s_scale)
        total = torch.zeros((), dtype=scalar_dtype(mean_delta.device), device=mean_delta.device)
        for delta, v_part, s_part, kept_part in chunks(
            mean_delta, v, s, kept, size=chunk_size(mean_delta.device, kept=True)
        ):
            part = self._moments(delta, v_part, s_part, s_scale, kept_part)
            if part is not None:
                total += part
        return total

    def move(self, weights: Tensor, v: Tensor, s: Tensor | None, scale: float, s_scale: float) -> None:
        """The second pass."""
        if self._kernels is not None:
            self._kernels.move(weights, v, s, scale, s_scale)
            return
        for parts in chunks(weights, v, s, size=chunk_size(weights.device, kept=True)):
            self._move(*parts, scale, s_scale)
