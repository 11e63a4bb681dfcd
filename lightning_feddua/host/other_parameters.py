"""Parameters of a module that are not trained: frozen ones, and those that no optimizer holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from lightning_feddua._private import version_of
from lightning_feddua.errors import ConfigurationError

# The values of parameters that stay are looked at in so many rounds, and later in rounds that are powers of two.
_CLOSE_ROUNDS = 4
# Integers of as many bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OtherParameters:
    """Watches the parameters that are not in the vector of weights.

    Most stay as they are: a pretrained backbone. Some are moved by the training step itself: a momentum teacher, or an
    average of the weights. Those travel with the float buffers, and it is found out at the start of a run which they
    are.

    Args:
        module: the module.
        trained: the parameters in the vector.
    """

    def __init__(self, module: nn.Module, trained: Iterable[Tensor]) -> None:
        known = {id(parameter) for parameter in trained}
        self.named = {name: p for name, p in module.named_parameters() if id(p) not in known}
        self._rounds = 0
        # Whether it is known which of them move.
        self.settled = not self.named
        self.note()

    def note(self) -> None:
        """Take the present values of all that stay for those they should have."""
        self._still = dict(self.named)
        self._frozen = [name for name, parameter in self.named.items() if not parameter.requires_grad]
        self._note_versions()
        self._fingerprints = {name: _fingerprint(parameter) for name, parameter in self._still.items()}

    @property
    def still(self) -> list[Tensor]:
        """Those that stay as they are."""
        return [parameter.detach() for parameter in self._still.values()]

    def let_move(self, names: Collection[str]) -> None:
        """Watch all but these."""
        self.settled = True
        self._still = {name: parameter for name, parameter in self._still.items() if name not in names}
        self._note_versions()

    def copies(self, trained: Iterable[Tensor]) -> list[str]:
        """Those that are copies of trained parameters, as in a target network; constant ones do not count."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in trained:
            by_shape.setdefault(parameter.shape, []).append(parameter.detach())
        return [
            name
            for name, parameter in self.named.items()
            if any(_is_copy(parameter.detach(), other) for other in by_shape.get(parameter.shape, ()))
        ]

    def values(self) -> dict[str, Tensor]:
        """Copies of all."""
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}

    def restore(self, values: dict[str, Tensor]) -> list[str]:
        """Put copies back; the names of those that have changed in between."""
        changed = [name for name, value in values.items() if not torch.equal(self.named[name], value)]
        with torch.no_grad():
            for name in changed:
                self.named[name].copy_(values[name])
        self._note_versions()
        return changed

    def drop_gradients(self) -> None:
        """Forget gradients, which no optimizer does."""
        for parameter in self.named.values():
            parameter.grad = None

    def check(self, deep: bool = False) -> None:
        """One clear error if a client has changed one that stayed as it was in the first steps of the run.

        Args:
            deep: whether it is the end of a round. Then the values are looked at now and then, and not only whether
                they have been written to, which writes through ``.data`` hide.
        """
        for name in self._frozen:
            if self.named[name].requires_grad:
                raise ConfigurationError(
                    f"The frozen parameter `{name}` was unfrozen in a client's local steps.",
                    "Let it require gradients from the start.",
                )
        self._rounds += deep
        due = deep and (self._rounds <= _CLOSE_ROUNDS or self._rounds & (self._rounds - 1) == 0)
        if not self._still or (not due and self._versions == self._present_versions()):
            return
        present = {name: _fingerprint(parameter) for name, parameter in self._still.items()}
        known = [self._fingerprints[name] for name in present]
        # All at once: a device is waited for once.
        if not torch.equal(torch.stack(list(present.values())), torch.stack(known)):
            changed = next(name for name, value in present.items() if not torch.equal(value, self._fingerprints[name]))
            raise ConfigurationError(
                f"The parameter `{changed}`, which is frozen or which no optimizer holds, changed in a client's local"
                " steps, but not in the first steps of the run, which show what is to be averaged.",
                "Change it in the first steps of each client too, give it to an optimizer, or register it as a"
                " buffer, which may change at any time.",
            )
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = self._present_versions()

    def _present_versions(self) -> list[tuple[int, int]]:
        return [(version_of(parameter), parameter.data_ptr()) for parameter in self._still.values()]


def _is_copy(parameter: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a shape have the same values, and not only one value."""
    few = tuple(slice(0, 2) for _ in parameter.shape)
    # Most pairs differ in their first elements.
    if parameter.numel() < 2 or not torch.equal(parameter[few], other[few]) or not torch.equal(parameter, other):
        return False
    return bool((parameter != parameter.reshape(-1)[0]).any())


def _fingerprint(parameter: Tensor) -> Tensor:
    """Two sums, of the values and of their bits, which tell whether a parameter has changed; as integers."""
    values = parameter.detach().reshape(-1)
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    size = values.element_size()
    whole = values.numel() * size % 8 == 0 and values.storage_offset() * size % 8 == 0
    bits = values.view(torch.int64 if whole else _INTEGERS[size])
    # Bits, in which NaN is the same as NaN.
    return torch.stack([bits.sum(), values.sum().to(torch.float32).view(torch.int32).to(torch.int64)])
