"""A module's trainable parameters as one vector, and its buffers beside it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_feddua.errors import ConfigurationError

# Elements handled at a time where float64 or other temporaries are needed: small enough to stay in a CPU's cache. More
# where temporaries are kept: new ones of that size come from the operating system, page by page.
_CHUNK = 1 << 16
_CHUNK_KEPT = 1 << 18
_CHUNK_ACCELERATOR = 1 << 24


def chunk_size(device: torch.device, kept: bool = False) -> int:
    """How many elements to handle at a time on a device.

    Args:
        device: the device.
        kept: whether temporaries are those of a :class:`Scratch`.
    """
    if device.type != "cpu":
        return _CHUNK_ACCELERATOR
    return _CHUNK_KEPT if kept else _CHUNK


class Scratch:
    """Temporaries for one chunk after another. A CPU keeps them; an accelerator's allocator does so by itself."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A temporary of a chunk's length, with anything in it.

        Args:
            name: the same memory is given again under the same name.
            like: the chunk.
            dtype: the chunk's own if left out.
        """
        dtype = dtype or like.dtype
        # A compiler makes its own plan, in which most temporaries do not exist.
        if like.device.type != "cpu" or torch.compiler.is_compiling():
            return torch.empty_like(like, dtype=dtype)
        kept = self._kept.get((name, dtype))
        if kept is None or len(kept) < len(like):
            kept = self._kept[name, dtype] = torch.empty_like(like, dtype=dtype)
        return kept[: len(like)]

    def cast(self, name: str, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        """A chunk in another dtype; itself where it has that."""
        return chunk if chunk.dtype == dtype else self.empty(name, chunk, dtype).copy_(chunk)


def chunks(*vectors: Tensor | None, size: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Windows of all vectors in step, so that temporaries stay in the cache and are never d-sized.

    Args:
        vectors: of one length; at least one is not None, and a None is handed on.
        size: of a window; by default as suits the device.
    """
    first = next(vector for vector in vectors if vector is not None)
    size = chunk_size(first.device) if size is None else size
    for start in range(0, first.numel(), size):
        yield tuple(None if vector is None else vector[start : start + size] for vector in vectors)


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of accumulated scalars: float64, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def squared_norm(vector: Tensor) -> Tensor:
    """``‖vector‖²`` accumulated in float64, as a tensor on the same device (no synchronisation)."""
    dtype = scalar_dtype(vector.device)
    if vector.numel() <= chunk_size(vector.device):
        vector = vector.to(dtype)
        return torch.dot(vector, vector)
    total = torch.zeros((), dtype=dtype, device=vector.device)
    for chunk in vector.split(chunk_size(vector.device)):
        chunk = chunk.to(dtype)
        total += torch.dot(chunk, chunk)
    return total


class FlatParameters:
    """The trainable parameters of a module as views of one flat vector.

    While this object holds them, ``vector`` and the module's parameters share memory: loading global weights is one
    copy, a client's update is one subtraction in place. Frozen parameters stay where they are; tied ones appear once.

    Args:
        module: the module, already on its device and in its precision.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = trainable_parameters(module)
        self._strides = [_dense_stride(parameter) for parameter in self.tensors]
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

    def named_views(self, module: nn.Module, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Windows on a flat vector with their names in the module, all names of a tied parameter included."""
        views = {id(p): view for p, view in zip(self.tensors, self.views(vector), strict=True)}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in views:
                yield name, views[id(parameter)]

    def stacked_views(self, matrix: Tensor) -> Iterator[Tensor]:
        """Windows on a matrix of flat vectors, one for each parameter, with its shape behind the first axis."""
        offset = 0
        for parameter, strides in zip(self.tensors, self._strides, strict=True):
            start = matrix.storage_offset() + offset
            yield matrix.as_strided((len(matrix), *parameter.shape), (matrix.stride(0), *strides), start)
            offset += parameter.numel()

    def gather(self, tensors: Sequence[Tensor | None], out: Tensor) -> list[Tensor]:
        """Copy a tensor for each parameter into a flat vector, or stacks of them into a matrix; None is left out.

        Returns:
            The windows on the vector, one for each parameter.
        """
        windows = list(self.views(out) if out.dim() == 1 else self.stacked_views(out))
        pairs = [(window, tensor) for window, tensor in zip(windows, tensors, strict=True) if tensor is not None]
        torch._foreach_copy_([window for window, _ in pairs], [tensor for _, tensor in pairs])
        return windows

    def load(self, weights: Tensor) -> None:
        """Copy global weights into the module."""
        self.vector.copy_(weights)

    def take_delta(self, weights: Tensor) -> Tensor:
        """The update since :meth:`load` of the same weights, written over the vector itself where dtypes agree.

        The module's weights are spent after this call; the next client loads them anew.
        """
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


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a run trains, tied ones once; one clear error if there is nothing to train."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"Parameter `{name}` of `{type(module).__name__}` is not initialised yet.",
                "Run one forward pass through the lazy layers before the federated run.",
            )
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigurationError(
            f"`{type(module).__name__}` has no trainable parameters.",
            "Give it at least one parameter with `requires_grad=True`.",
        )
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"The trainable parameters of `{type(module).__name__}` have several dtypes: {sorted(map(str, dtypes))}.",
            "Convert the module to one of them, or freeze the others.",
        )
    return parameters


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a dense copy, `channels_last` kept."""
    return torch.empty_like(parameter, device="meta").stride()


class ModuleBuffers:
    """The buffers of a module (BatchNorm statistics and the like), which no server rule ever touches.

    Float (and complex) buffers travel as one vector and are averaged over clients; integer ones take the maximum. The
    global values are kept here, each in its own dtype, and a buffer that no client changes stays as it is to the bit.

    Args:
        module: the module, already on its device and in its precision.
    """

    # Larger integer buffers, such as masks, are taken for constants and not sent.
    LARGEST_INTEGERS = 1 << 16

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.float_names: list[str] = []
        self.integer_names: list[str] = []
        self._constant_names: list[str] = []
        self._globals: dict[str, Tensor] = {}
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                self.float_names.append(name)
            elif buffer.numel() <= self.LARGEST_INTEGERS:
                self.integer_names.append(name)
            else:
                self._constant_names.append(name)
            self._globals[name] = buffer.detach().clone()
        self.float_count = sum(as_real(self._globals[name]).numel() for name in self.float_names)
        self.integer_count = sum(self._globals[name].numel() for name in self.integer_names)

    def restore(self) -> None:
        """Put the global values into the module."""
        with torch.no_grad():
            for name, value in self._globals.items():
                self._module.get_buffer(name).copy_(value)

    def load(self, values: dict[str, Tensor]) -> None:
        """Take over saved global values, and put them into the module."""
        for name, value in values.items():
            self._globals[name].copy_(value)
        self.restore()

    def floats(self, dtype: torch.dtype) -> Tensor | None:
        """The module's float buffers as one vector, or None where there are none."""
        return flatten_buffers(self._current(self.float_names), dtype)

    def integers(self) -> Tensor | None:
        """The module's integer and boolean buffers as one int64 vector, or None where there are none."""
        for name in self._constant_names:
            if not torch.equal(self._module.get_buffer(name), self._globals[name]):
                raise ConfigurationError(
                    f"A client changed the integer buffer `{name}` of {self._globals[name].numel():,} elements.",
                    f"Keep integer buffers that change at {self.LARGEST_INTEGERS:,} elements or less.",
                )
        return flatten_buffers(self._current(self.integer_names), torch.int64)

    def global_floats(self, dtype: torch.dtype) -> Tensor | None:
        """The global float buffers as one vector, or None where there are none."""
        return flatten_buffers([self._globals[name] for name in self.float_names], dtype)

    def update(self, floats: Tensor | None, changed: Tensor | None, integers: Tensor | None) -> None:
        """Take over a round's buffers: floats where a client changed them, and integers that differ.

        Args:
            floats: the mean of the clients' float buffers.
            changed: which of them any client changed.
            integers: the maximum of the clients' integer buffers.
        """
        if floats is not None and changed is not None:
            _write([as_real(self._globals[name]) for name in self.float_names], floats, changed)
        if integers is not None:
            own = flatten_buffers([self._globals[name] for name in self.integer_names], torch.int64)
            assert own is not None
            _write([self._globals[name] for name in self.integer_names], integers, integers != own)

    def _current(self, names: list[str]) -> list[Tensor]:
        # Looked up each time, because a module may assign a new tensor to a buffer.
        return [self._module.get_buffer(name).detach() for name in names]


def as_real(tensor: Tensor) -> Tensor:
    """A tensor itself, or a view of a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flatten_buffers(tensors: list[Tensor], dtype: torch.dtype, leading: int = 0) -> Tensor | None:
    """Tensors as one vector in a dtype, behind as many leading axes; None for none at all."""
    if not tensors:
        return None
    return torch.cat([as_real(t).reshape(*t.shape[:leading], -1).to(dtype) for t in tensors], dim=-1)


def _write(tensors: list[Tensor], values: Tensor, where: Tensor) -> None:
    offset = 0
    for tensor in tensors:
        span = slice(offset, offset + tensor.numel())
        new = values[span].view(tensor.shape).to(tensor.dtype)
        tensor.copy_(torch.where(where[span].view(tensor.shape), new, tensor))
        offset += tensor.numel()
