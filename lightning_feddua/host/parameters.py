"""A module's trainable parameters as one vector."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_feddua._private import copy_all
from lightning_feddua.errors import ConfigurationError


@dataclass(frozen=True)
class ParameterLayout:
    """Where each trainable parameter is in the flat vector of weights.

    Args:
        names: the parameters' names in the module.
        shapes: their shapes.
        strides: their strides, which tell the order of elements; ``channels_last`` has its own.
        offsets: where each begins.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Windows on a flat vector, such as the weights or the mean update, in the parameters' shapes."""
        places = zip(self.names, self.shapes, self.strides, self.offsets, strict=True)
        return {name: vector.as_strided(s, strides, vector.storage_offset() + o) for name, s, strides, o in places}


class FlatParameters:
    """The trainable parameters of a module as views of one flat vector.

    While this object holds them, ``vector`` and the module's parameters share memory: loading global weights is one
    copy, a client's update is one subtraction in place. Frozen parameters stay where they are; tied ones appear once.

    Args:
        module: the module, already on its device and in its precision.
        held: what optimizers hold; only these parameters are trained. None for all that require gradients.
    """

    def __init__(self, module: nn.Module, held: Sequence[Tensor] | None = None) -> None:
        self.tensors = trainable_parameters(module, held)
        self._strides = [_dense_stride(parameter) for parameter in self.tensors]
        # Whether the weights that `take_delta` spends are kept, and where.
        self.keeps = False
        self.kept = torch.empty(0)
        first = self.tensors[0]
        self.vector = torch.empty(
            sum(p.numel() for p in self.tensors), dtype=first.dtype, device=first.device, requires_grad=False
        )
        for parameter, view in zip(self.tensors, self.views(self.vector), strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def __len__(self) -> int:
        return self.vector.numel()

    def views(self, vector: Tensor) -> Iterator[Tensor]:
        """Windows on a flat vector, one for each parameter, with its shape and memory format."""
        offset = 0
        for parameter, strides in zip(self.tensors, self._strides, strict=True):
            yield vector.as_strided(parameter.shape, strides, vector.storage_offset() + offset)
            offset += parameter.numel()

    def named(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with their names in the module, in the vector's order."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for parameter in self.tensors:
            yield names[id(parameter)], parameter

    def layout(self, module: nn.Module) -> ParameterLayout:
        """Names, shapes and places of the parameters in the vector."""
        names, tensors = zip(*self.named(module), strict=True)
        offsets = tuple(accumulate((tensor.numel() for tensor in tensors[:-1]), initial=0))
        return ParameterLayout(names, tuple(t.shape for t in tensors), tuple(self._strides), offsets)

    def named_views(self, module: nn.Module, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Windows on a flat vector with their names in the module, all names of a tied parameter included."""
        views = {id(p): view for p, view in zip(self.tensors, self.views(vector), strict=True)}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in views:
                yield name, views[id(parameter)]

    def stacked_views(self, matrix: Tensor, rows: int | None = None) -> Iterator[Tensor]:
        """Windows on a matrix of flat vectors, one for each parameter, with its shape behind the first axis.

        Args:
            matrix: the vectors.
            rows: how many of them; None for all.
        """
        rows = len(matrix) if rows is None else rows
        offset = 0
        for parameter, strides in zip(self.tensors, self._strides, strict=True):
            start = matrix.storage_offset() + offset
            yield matrix.as_strided((rows, *parameter.shape), (matrix.stride(0), *strides), start)
            offset += parameter.numel()

    def gather(self, tensors: Sequence[Tensor | None], out: Tensor) -> list[Tensor]:
        """Copy a tensor for each parameter into a flat vector, or stacks of them into a matrix; None is left out.

        Returns:
            The windows on the vector, one for each parameter.
        """
        windows = list(self.views(out) if out.dim() == 1 else self.stacked_views(out))
        dense = [tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor for tensor in tensors]
        pairs = [(window, tensor) for window, tensor in zip(windows, dense, strict=True) if tensor is not None]
        copy_all([window for window, _ in pairs], [tensor for _, tensor in pairs])
        return windows

    def load(self, weights: Tensor) -> None:
        """Copy global weights into the module."""
        self.vector.copy_(weights)

    def take_delta(self, weights: Tensor) -> Tensor:
        """The update since :meth:`load` of the same weights, written over the vector itself where dtypes agree.

        The module's weights are spent after this call; the next client loads them anew.
        """
        if self.keeps:
            self.kept = self.vector.to(weights.dtype, copy=True)
        if self.vector.dtype == weights.dtype:
            return self.vector.sub_(weights)
        # Low-precision modules start from the rounded weights; the difference is taken in the server's precision.
        return self.vector.to(weights.dtype).sub_(weights.to(self.vector.dtype))

    def drop_gradients(self) -> None:
        """Forget gradients, so that none reaches the next client."""
        for parameter in self.tensors:
            parameter.grad = None

    def release(self) -> None:
        """Give each parameter memory of its own again."""
        for parameter in self.tensors:
            parameter.data = parameter.data.clone()
        self.drop_gradients()


def trainable_parameters(module: nn.Module, held: Sequence[Tensor] | None = None) -> list[nn.Parameter]:
    """The parameters that a run trains, tied ones once; one clear error if there is nothing to train."""
    name = type(module).__name__
    known = None if held is None else {id(tensor) for tensor in held}
    named = {n: p for n, p in module.named_parameters() if p.requires_grad and (known is None or id(p) in known)}
    if not named:
        raise ConfigurationError(
            f"`{name}` has no trainable parameters.",
            "Give it, and its optimizer, at least one parameter with `requires_grad=True`.",
        )
    for path, parameter in named.items():
        if parameter.is_complex():
            raise ConfigurationError(
                f"The trainable parameter `{path}` is complex, and server rules work on real numbers.",
                "Keep it as a real parameter, and use `torch.view_as_complex` of that in the forward pass.",
            )
    dtypes = {p.dtype for p in named.values()}
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"The trainable parameters of `{name}` have several dtypes: {sorted(map(str, dtypes))}.",
            "Convert the module to one of them, or freeze the others.",
        )
    return list(named.values())


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a dense copy, `channels_last` kept."""
    return torch.empty_like(parameter, device="meta").stride()
