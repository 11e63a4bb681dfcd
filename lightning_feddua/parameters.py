"""A module's trainable parameters as one vector, and its buffers beside it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_feddua.errors import ConfigurationError

# Elements handled at a time where float64 or other temporaries are needed: small enough to stay in a CPU's cache.
_CHUNK = 1 << 16
_CHUNK_ACCELERATOR = 1 << 24


def chunk_size(device: torch.device) -> int:
    """How many elements to handle at a time on a device."""
    return _CHUNK if device.type == "cpu" else _CHUNK_ACCELERATOR


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype of accumulated scalars: float64, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def squared_norm(vector: Tensor) -> Tensor:
    """``‖vector‖²`` accumulated in float64, as a tensor on the same device (no synchronisation)."""
    dtype = scalar_dtype(vector.device)
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
        self._parameters = trainable_parameters(module)
        first = self._parameters[0]
        self.vector = torch.empty(
            sum(p.numel() for p in self._parameters), dtype=first.dtype, device=first.device, requires_grad=False
        )
        for parameter, view in zip(self._parameters, self.views(self.vector), strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def __len__(self) -> int:
        return self.vector.numel()

    def views(self, vector: Tensor) -> Iterator[Tensor]:
        """Windows on a flat vector, one for each parameter, with its shape and memory format."""
        offset = 0
        for parameter in self._parameters:
            yield vector.as_strided(parameter.shape, _dense_stride(parameter), vector.storage_offset() + offset)
            offset += parameter.numel()

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
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        """Give each parameter memory of its own again."""
        for parameter in self._parameters:
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

    Float buffers travel as one vector and are averaged over clients; integer ones take the maximum.

    Args:
        module: the module, already on its device and in its precision.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = dict(module.named_modules(remove_duplicate=False))
        self._floats: list[tuple[nn.Module, str]] = []
        self._integers: list[tuple[nn.Module, str]] = []
        for path, buffer in module.named_buffers():
            owner, _, name = path.rpartition(".")
            group = self._floats if buffer.is_floating_point() else self._integers
            group.append((owners[owner], name))
        self.float_count = sum(b.numel() for b in _tensors(self._floats))
        self.integer_count = sum(b.numel() for b in _tensors(self._integers))

    def floats(self, dtype: torch.dtype) -> Tensor | None:
        """A copy of all float buffers as one vector, or None where there are none."""
        return _flatten(self._floats, dtype)

    def integers(self) -> Tensor | None:
        """A copy of all integer and boolean buffers as one int64 vector, or None where there are none."""
        return _flatten(self._integers, torch.int64)

    def load(self, floats: Tensor | None, integers: Tensor | None) -> None:
        """Write values from :meth:`floats` and :meth:`integers` back into the module."""
        _scatter(self._floats, floats)
        _scatter(self._integers, integers)


def _tensors(group: list[tuple[nn.Module, str]]) -> Iterator[Tensor]:
    # Looked up each time, because a module may assign a new tensor to a buffer.
    for owner, name in group:
        yield owner.get_buffer(name)


def _flatten(group: list[tuple[nn.Module, str]], dtype: torch.dtype) -> Tensor | None:
    return torch.cat([buffer.detach().reshape(-1).to(dtype) for buffer in _tensors(group)]) if group else None


def _scatter(group: list[tuple[nn.Module, str]], values: Tensor | None) -> None:
    if values is None:
        return
    offset = 0
    with torch.no_grad():
        for buffer in _tensors(group):
            buffer.copy_(values[offset : offset + buffer.numel()].view(buffer.shape))
            offset += buffer.numel()
