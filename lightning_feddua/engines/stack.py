"""Several clients' parameters and buffers as one."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_feddua.engines.base import Clipping, GlobalState
from lightning_feddua.host.buffers import flatten_buffers
from lightning_feddua.host.federation import Federation


class ClientStack:
    """The parameters and buffers of several clients, stacked along a first axis.

    Args:
        federation: the module whose parameters are stacked.
        matrix: where they are: the clients' parameters as flat vectors, a row each.
    """

    def __init__(self, federation: Federation, matrix: Tensor) -> None:
        self.size = len(matrix)
        self._federation = federation
        self.matrix = matrix
        self._gradients: Tensor | None = None
        self.parameters: dict[str, Tensor] = {}
        self.by_parameter: dict[int, Tensor] = {}
        views = federation.parameters.stacked_views(self.matrix)
        for (name, parameter), view in zip(federation.parameters.named(federation.module), views, strict=True):
            self.parameters[f"module.{name}"] = self.by_parameter[id(parameter)] = view.detach().requires_grad_()
        self.buffers: dict[str, Tensor] = {}

    def load(self, state: GlobalState) -> None:
        """All clients at the global state."""
        self.matrix.copy_(state.weights)
        self._federation.buffers.restore()
        self.buffers = {
            f"module.{name}": buffer.detach().expand(self.size, *buffer.shape).clone()
            for name, buffer in self._federation.module.named_buffers()
        }
        for parameter in self.parameters.values():
            parameter.grad = None

    def show(self, client: int) -> None:
        """Put one client's parameters and buffers into the module.

        Args:
            client: its place in the stack.
        """
        module = self._federation.module
        self._federation.parameters.vector.copy_(self.matrix[client])
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(self.buffers[f"module.{name}"][client])

    def at(self, weights: Tensor) -> dict[str, Tensor]:
        """All clients' parameters at the same weights, to differentiate."""
        rows = weights.to(self.matrix.dtype).expand_as(self.matrix)
        views = self._federation.parameters.stacked_views(rows)
        return {name: view.detach().requires_grad_() for name, view in zip(self.parameters, views, strict=True)}

    def flat_gradients(self) -> Tensor:
        """The clients' gradients, a row each; the parameters' gradients become windows on them."""
        if self._gradients is None:
            self._gradients = torch.empty_like(self.matrix)
        self._gradients.zero_()
        gradients = [parameter.grad for parameter in self.parameters.values()]
        windows = self._federation.parameters.gather(gradients, self._gradients)
        for parameter, window in zip(self.parameters.values(), windows, strict=True):
            if parameter.grad is not None:
                parameter.grad = window
        return self._gradients

    def clip_gradients(self, clip: Clipping) -> None:
        """Clip each client's gradient at a global norm, as `clip_grad_norm_` does for one, or each element."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if clip.algorithm == "value":
            for gradient in gradients:
                gradient.clamp_(-clip.value, clip.value)
            return
        squares = [gradient.flatten(1).square().sum(dim=1) for gradient in gradients]
        norms = torch.stack(squares).sum(dim=0).sqrt()
        factors = (clip.value / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))

    def take_deltas(self, weights: Tensor) -> Tensor:
        """The clients' updates, a row each, written over the stack where dtypes agree."""
        if self.matrix.dtype == weights.dtype:
            return self.matrix.sub_(weights)
        return self.matrix.to(weights.dtype).sub_(weights.to(self.matrix.dtype))

    def flat_buffers(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The clients' float and integer buffers, a row each."""
        buffers = self._federation.buffers

        def flat(names: list[str], dtype: torch.dtype) -> Tensor | None:
            return flatten_buffers([self.buffers[f"module.{name}"] for name in names], dtype, leading=1)

        return flat(buffers.float_names, dtype), flat(buffers.integer_names, torch.int64)
