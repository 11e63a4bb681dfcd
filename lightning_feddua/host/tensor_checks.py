"""Whether a module's tensors can be trained in a federation; if not, one clear error before training says so."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_feddua._private import recomputed_attributes
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.hidden.snapshot import Snapshot


def tensor_names(module: nn.Module) -> set[str]:
    """The names of a module's parameters and buffers."""
    return {name for name, _ in chain(module.named_parameters(), module.named_buffers())}


def check_initialised(module: nn.Module, known: set[str] | None = None) -> None:
    """Refuse lazy layers that have not seen a batch, and layers that come too late.

    Args:
        module: the module, set up.
        known: the names of the tensors that it has in the parent of forked ranks; None without such a parent.
    """
    if late := [] if known is None else sorted((tensor_names(module) - known) & module.state_dict().keys()):
        name = type(module).__name__
        raise ConfigurationError(
            f"`{name}.setup` makes `{late[0]}` in forked ranks, and the `{name}` of your script would not get what they"
            " train.",
            "Make it in `__init__` or `configure_model`, or start the ranks with torchrun or `strategy='ddp'`.",
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"Parameter `{name}` of `{type(module).__name__}` is not initialised yet.",
                "Run one forward pass through the lazy layers before the federated run.",
            )


def check_tensors(module: nn.Module, held: Sequence[Tensor] | None, hidden: Snapshot) -> None:
    """Refuse optimizers that hold something else than parameters, and parameters that share memory.

    Args:
        module: the module.
        held: what its optimizers hold; None outside of training.
        hidden: what it keeps in Python.
    """
    if held is None:
        return
    named = dict(module.named_parameters())
    own = {id(parameter) for parameter in named.values()}
    for tensor in held:
        if id(tensor) not in own:
            label = hidden.label_of(tensor)
            what = f"`{label}`" if label else f"a tensor of shape {tuple(tensor.shape)}"
            raise ConfigurationError(
                f"An optimizer of `{type(module).__name__}` holds {what}, which is no parameter of the module.",
                "Make it an `nn.Parameter` of the module, so that clients share it.",
            )
    trained = {id(tensor) for tensor in held if tensor.requires_grad}
    # Hooks make these anew from parameters before each forward pass.
    excepted = own | {id(vars(m).get(name)) for m in module.modules() for name in recomputed_attributes(m)}
    others = [*module.named_buffers(), *hidden.tensors()]
    kept = [(name, tensor) for name, tensor in others if id(tensor) not in excepted]
    _check_memory([*named.items(), *kept], trained)


class _Span(NamedTuple):
    """Where a tensor lies in memory."""

    start: int
    end: int
    name: str
    tensor: Tensor
    is_trained: bool


def _check_memory(tensors: list[tuple[str, Tensor]], trained: set[int]) -> None:
    """Refuse what shares memory with a trained parameter, which gets new memory."""
    spans = []
    for name, tensor in tensors:
        if tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            end = start + (last + 1) * tensor.element_size()
            spans.append(_Span(start, end, name, tensor, id(tensor) in trained))
    # Parameters before what is kept of them.
    spans.sort(key=lambda span: (span.start, not span.is_trained))
    open_spans: list[_Span] = []
    for span in spans:
        open_spans = [other for other in open_spans if other.end > span.start]
        for other in open_spans:
            if (span.is_trained or other.is_trained) and _overlap(other, span):
                raise ConfigurationError(
                    f"`{other.name}` and `{span.name}` share memory, which one vector of all weights would end.",
                    "Tie parameters by assigning one to the other (`a.weight = b.weight`), and keep no views of them.",
                )
        open_spans.append(span)


def _overlap(first: _Span, second: _Span) -> bool:
    """Whether two tensors have an element in common: columns of one matrix lie between each other, and do not."""
    size = first.tensor.element_size()
    if first.tensor.device != second.tensor.device:
        return False
    if size != second.tensor.element_size() or (second.start - first.start) % size:
        return True
    start = min(first.start, second.start)
    taken = torch.zeros((max(first.end, second.end) - start) // size, dtype=torch.bool)
    views = [taken.as_strided(s.tensor.shape, s.tensor.stride(), (s.start - start) // size) for s in (first, second)]
    views[0].fill_(True)
    return bool(views[1].any())
