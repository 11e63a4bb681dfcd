"""Numbers that are not finite: what of a client, or of a round's sums, has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_feddua.aggregation.update import ClientUpdate, RoundUpdate

# What of a client can be not finite, in the order of the bits of a flaw.
_PARTS = ("update", "buffers", "vectors that its algorithm sends or keeps", "numbers that its algorithm sends")


def is_finite(tensor: Tensor) -> Tensor:
    """Whether all elements are finite, as a scalar on the same device (no synchronisation)."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    # In one pass, and without a temporary; zero times anything else is not zero.
    return (low * 0 + high * 0) == 0


def flaw_of(update: ClientUpdate, global_floats: Tensor | None, update_too: bool) -> Tensor | None:
    """What of a client is not finite, as a number with a bit for each part; None where there is nothing to look at.

    Args:
        update: what the client gives.
        global_floats: the float buffers that it started from.
        update_too: whether to look at the update itself, of which the squared norm tells as well.
    """
    vectors = [*update.extra_vectors.values(), *([] if update.kept is None else [update.kept])]
    found: list[Tensor | None] = [is_finite(update.delta) if update_too else None, None]
    if update.floats is not None and global_floats is not None:
        # A buffer may hold infinities for good, as masks do.
        found[1] = (update.floats.isfinite() | ~global_floats.isfinite()).all()
    numbers = [torch.as_tensor(value, device=update.delta.device) for value in update.scalars.values()]
    found += [_all(vectors), _all(numbers)]
    bits = [~finite * 2.0**i for i, finite in enumerate(found) if finite is not None]
    return torch.stack(bits).sum() if bits else None


def told(flaw: float) -> str:
    """What a flaw is, in words: the first part that has one."""
    part = next(part for i, part in enumerate(_PARTS) if int(flaw) >> i & 1)
    return f"its {part} {'is' if part == _PARTS[0] else 'are'} not finite"


def flawed_sum(update: RoundUpdate, global_floats: Tensor | None) -> str | None:
    """What of a round's sums is not finite, in words; None if all are.

    Args:
        update: the round's.
        global_floats: the float buffers that clients started from, which may not have been finite before.
    """
    if not update.mean_delta_is_finite:
        return "updates"
    floats, changed = update.float_buffers, update.float_changed
    if floats is not None and changed is not None and global_floats is not None:
        sound = floats.isfinite() | ~changed | ~global_floats.isfinite()
        if not bool(sound.all()):
            return "buffers"
    finite = _all(list(update.extra_vectors.values()))
    return None if finite is None or bool(finite) else "vectors that their algorithm sends"


def flawed(named: dict[str, Any]) -> list[str]:
    """The names of values that are not finite, or hold such; with one wait for the device.

    Args:
        named: tensors and plain values by name, nested in any way.
    """
    leaves = [leaf for name, value in named.items() for leaf in _leaves(name, value)]
    tensors = [(name, is_finite(value)) for name, value in leaves if isinstance(value, Tensor)]
    flags = torch.stack([flag.to(tensors[0][1].device) for _, flag in tensors]).tolist() if tensors else []
    found = [name for (name, _), fine in zip(tensors, flags, strict=True) if not fine]
    return found + [name for name, value in leaves if isinstance(value, float) and not abs(value) < float("inf")]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, float) or (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name} `{key}`", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(name, item)


def _all(tensors: list[Tensor]) -> Tensor | None:
    return torch.stack([is_finite(tensor) for tensor in tensors]).all() if tensors else None
