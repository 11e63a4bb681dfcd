"""A module's buffers, which no server rule touches."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_feddua._private import BUFFERS, PARAMETERS
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.hidden.same_values import same_value


class ModuleBuffers:
    """The buffers of a module (BatchNorm statistics and the like), which no server rule ever touches.

    Float (and complex) buffers travel as one vector and are averaged over clients; integer ones take the maximum. The
    global values are kept here, each in its own dtype, and a buffer that no client changes stays as it is to the bit.
    Parameters that local steps move without an optimizer can be included.

    Args:
        module: the module, already on its device and in its precision.
    """

    # Larger integer buffers, such as masks, are taken for constants and not sent.
    LARGEST_INTEGERS = 1 << 16

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.float_names: list[str] = []
        self.integer_names: list[str] = []
        # Parameters that travel with the buffers.
        self.parameter_names: list[str] = []
        # Floats that a round's only client sends to the bit as well, as pairs of integers.
        self._exact_names: list[str] = []
        self._constant_names: list[str] = []
        self._globals: dict[str, Tensor] = {}
        # Where the module keeps each: it may assign another tensor to a buffer.
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for name, buffer in module.named_buffers():
            self._add(name, buffer, BUFFERS)
        self._count()

    def _add(self, name: str, tensor: Tensor, registry: str) -> None:
        if tensor.is_floating_point() or tensor.is_complex():
            self.float_names.append(name)
        elif tensor.numel() <= self.LARGEST_INTEGERS:
            self.integer_names.append(name)
        else:
            self._constant_names.append(name)
        path, _, own_name = name.rpartition(".")
        self._places[name] = vars(self._module.get_submodule(path))[registry], own_name
        self._globals[name] = tensor.detach().clone()

    def _count(self) -> None:
        self.float_count = sum(as_real(self._globals[name]).numel() for name in self.float_names)
        self.integer_count = sum(self._globals[name].numel() for name in self.integer_names)
        self.integer_count += sum(2 * as_real(self._globals[name]).numel() for name in self._exact_names)

    def send_exactly(self, dtype: torch.dtype | None) -> None:
        """From now on there is one client in a round, whose buffers are the new global ones, to the bit.

        Args:
            dtype: what floats are sent in, which rounds those of a wider one; None for the mean of several clients.
        """
        wide = [name for name in self.float_names if self._globals[name].dtype in (torch.float64, torch.complex128)]
        self._exact_names = wide if dtype == torch.float32 else []
        self._count()

    def include(self, names: Collection[str]) -> None:
        """Treat parameters like buffers from now on, with their present values as the global ones."""
        self.parameter_names += names
        for name in names:
            self._add(name, self._module.get_parameter(name), PARAMETERS)
        self._count()

    def tensors(self) -> Iterator[Tensor]:
        """The module's own tensors."""
        return (tensor for place in self._places.values() if (tensor := _entry(*place)) is not None)

    def restore(self) -> None:
        """Put the global values into the module."""
        with torch.no_grad():
            for name, value in self._globals.items():
                registry, own_name = self._places[name]
                tensor = registry[own_name]
                if tensor is None or tensor.shape != value.shape or tensor.is_inference():
                    registry[own_name] = value.clone()
                else:
                    tensor.copy_(value)

    def global_values(self) -> list[Tensor]:
        """The global values, in a fixed order."""
        return list(self._globals.values())

    def named_global_values(self) -> dict[str, Tensor]:
        """The global values by name."""
        return self._globals

    def take(self) -> None:
        """Take the module's values for the global ones, as a validation has left them."""
        for name in self.changed():
            self._globals[name].copy_(self._tensor(name))

    def changed(self) -> list[str]:
        """The buffers that have other values in the module."""
        return [name for name, value in self._globals.items() if not same_value(self._tensor(name), value)]

    def load(self, values: dict[str, Tensor]) -> None:
        """Take over saved global values, and put them into the module."""
        for name, value in values.items():
            # A cache that was made in the run is made again.
            if name in self._globals:
                self._globals[name].copy_(value)
        self.restore()

    def floats(self, dtype: torch.dtype) -> Tensor | None:
        """The module's float buffers as one vector, or None where there are none."""
        return flatten_buffers(self._current(self.float_names), dtype)

    def integers(self) -> Tensor | None:
        """The module's integer and boolean buffers as one int64 vector, or None where there are none.

        What is sent exactly comes after them.
        """
        for name in self._constant_names:
            if not torch.equal(self._tensor(name), self._globals[name]):
                raise ConfigurationError(
                    f"A client changed the integer buffer `{name}` of {self._globals[name].numel():,} elements.",
                    f"Keep integer buffers that change at {self.LARGEST_INTEGERS:,} elements or less.",
                )
        exact = [as_real(tensor).reshape(-1).view(torch.int32) for tensor in self._current(self._exact_names)]
        return flatten_buffers([*self._current(self.integer_names), *exact], torch.int64)

    def global_floats(self, dtype: torch.dtype) -> Tensor | None:
        """The global float buffers as one vector, or None where there are none."""
        return flatten_buffers([self._globals[name] for name in self.float_names], dtype)

    def update(self, floats: Tensor | None, changed: Tensor | None, integers: Tensor | None) -> None:
        """Take over a round's buffers: floats where a client changed them, and integers that differ.

        Args:
            floats: the mean of the clients' float buffers.
            changed: which of them any client changed.
            integers: the maximum of the clients' integer buffers, and what the only client sends exactly.
        """
        if floats is not None and changed is not None:
            _write([as_real(self._globals[name]) for name in self.float_names], floats, changed)
        if integers is not None:
            own = [self._globals[name] for name in self.integer_names]
            maximum, exact = integers.tensor_split([sum(tensor.numel() for tensor in own)])
            if (known := flatten_buffers(own, torch.int64)) is not None:
                _write(own, maximum, maximum != known)
            values = exact.to(torch.int32).view(torch.float64)
            everywhere = torch.ones_like(values, dtype=torch.bool)
            _write([as_real(self._globals[name]) for name in self._exact_names], values, everywhere)

    def _current(self, names: list[str]) -> list[Tensor]:
        return [self._tensor(name) for name in names]

    def _tensor(self, name: str) -> Tensor:
        """A buffer as the module has it; one clear error if it has another shape than it started with."""
        registry, own_name = self._places[name]
        tensor, known = _entry(registry, own_name), self._globals[name]
        if tensor is not None and tensor.shape == known.shape:
            return tensor.detach()
        if name not in self._module.state_dict():
            # A cache, which each client may make its own.
            return known
        now = "None" if tensor is None else f"of shape {tuple(tensor.shape)}"
        raise ConfigurationError(
            f"The buffer `{name}` has shape {tuple(known.shape)} at first and is {now} after a client's local steps.",
            "Give it its final shape in `__init__`, or register it with `persistent=False` if it is a cache.",
        )


def _entry(registry: dict[str, Any], name: str) -> Tensor | None:
    """What a registry holds under a name; that of a scripted module is no dictionary."""
    if name not in registry:
        return None
    return registry[name]


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
