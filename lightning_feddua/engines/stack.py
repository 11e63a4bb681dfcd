"""Several clients' parameters and buffers as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_feddua.engines.base import Clipping, GlobalState
from lightning_feddua.host.buffers import flatten_buffers
from lightning_feddua.host.federation import Federation

# The parameters of so many single clients are kept as views of a stack, which take time to make.
_MOST_SINGLES = 64


class ClientStack:
    """The parameters and buffers of several clients, stacked along a first axis.

    The last clients may end before the others: from then on, ``parameters`` and ``buffers`` are those of the first
    ones, up to :meth:`complete`.

    Args:
        federation: the module whose parameters are stacked.
        matrix: where they are: the clients' parameters as flat vectors, a row each.
    """

    def __init__(self, federation: Federation, matrix: Tensor) -> None:
        self.size = len(matrix)
        self._federation = federation
        self.matrix = matrix
        # How many clients still train.
        self.active = self.size
        self._gradients: Tensor | None = None
        named = list(federation.parameters.named(federation.module))
        self._names = [f"module.{name}" for name, _ in named]
        self._ids = [id(parameter) for _, parameter in named]
        self._all = self.parameters = self.leaves(matrix)
        # Those of clients that have made steps alone.
        self._singles: dict[int, dict[str, Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}
        # The buffers of clients that have ended, last ones first.
        self._ended: list[dict[str, Tensor]] = []

    @property
    def by_parameter(self) -> dict[int, Tensor]:
        """The stacked parameters by the id of the module's own."""
        return dict(zip(self._ids, self.parameters.values(), strict=True))

    @property
    def weights(self) -> Tensor:
        """The weights of the clients that still train, a row each."""
        return self.matrix if self.active == self.size else self.matrix[: self.active]

    def load(self, state: GlobalState) -> None:
        """All clients at the global state."""
        self.matrix.copy_(state.weights)
        self.active, self.parameters, self._ended = self.size, self._all, []
        self._federation.buffers.restore()
        self.buffers = {
            f"module.{name}": buffer.detach().expand(self.size, *buffer.shape).clone()
            for name, buffer in self._federation.module.named_buffers()
        }
        for parameter in self.parameters.values():
            parameter.grad = None

    def shrink(self, active: int) -> None:
        """Leave out the last clients, which have made their last step."""
        self._ended.append({name: buffer[active:] for name, buffer in self.buffers.items()})
        self.buffers = {name: buffer[:active] for name, buffer in self.buffers.items()}
        self.active = active
        # Views of the matrix and not of each other, which a compiler can follow.
        views = self._federation.parameters.stacked_views(self.matrix, active)
        self.parameters = {name: view.detach().requires_grad_() for name, view in zip(self._names, views, strict=True)}

    def complete(self) -> None:
        """After the last step: the buffers of all clients again."""
        if self._ended:
            rows = [self.buffers, *reversed(self._ended)]
            self.buffers = {name: torch.cat([own[name] for own in rows]) for name in self.buffers}
            self._ended = []

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

    def leaves(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters in some rows of weights, or in a single one, to differentiate.

        Args:
            rows: a matrix, or the vector of one client.
        """
        flat = self._federation.parameters
        views = flat.views(rows) if rows.dim() == 1 else flat.stacked_views(rows)
        return {name: view.detach().requires_grad_() for name, view in zip(self._names, views, strict=True)}

    def leaves_of(self, taken: Any) -> dict[str, Tensor]:
        """The parameters of some of the clients that still train, to differentiate; copies if they are listed.

        Args:
            taken: their places: a slice, a list or a single one.
        """
        if taken == slice(0, self.active):
            return self.parameters
        if not isinstance(taken, int):
            return self.leaves(self.matrix[taken])
        if taken not in self._singles and len(self._singles) < _MOST_SINGLES:
            self._singles[taken] = self.leaves(self.matrix[taken])
        return self._singles.get(taken) or self.leaves(self.matrix[taken])

    def at(self, weights: Tensor, taken: Any) -> dict[str, Tensor]:
        """The parameters of some clients, all at the same weights, to differentiate."""
        rows = self.matrix[taken]
        return self.leaves(weights.to(rows.dtype).expand_as(rows))

    def buffers_of(self, taken: Any) -> dict[str, Tensor]:
        """The buffers of some of the clients that still train."""
        return {name: buffer[taken] for name, buffer in self.buffers.items()}

    def flat_gradients(self) -> Tensor:
        """The clients' gradients, a row each; the parameters' gradients become windows on them."""
        if self._gradients is None or len(self._gradients) != self.active:
            self._gradients = None
            self._gradients = torch.empty_like(self.weights)
        flat = self._gradients.zero_()
        gradients = [parameter.grad for parameter in self.parameters.values()]
        windows = self._federation.parameters.gather(gradients, flat)
        for parameter, window in zip(self.parameters.values(), windows, strict=True):
            if parameter.grad is not None:
                parameter.grad = window
        return flat

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
