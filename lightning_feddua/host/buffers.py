"""A module's buffers, which no server rule touches."""

import torch
from torch import Tensor, nn

from lightning_feddua.errors import ConfigurationError


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
