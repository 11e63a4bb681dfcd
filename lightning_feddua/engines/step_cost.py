"""What a local step costs, by counting: kernels, operations and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_feddua._private import TorchDispatchMode, tree_leaves


@dataclass
class StepCost:
    """The cost of some steps.

    Args:
        kernels: how many kernels are started.
        flops: floating-point operations of matrix products, convolutions and attention.
        bytes: what kernels write.
        fused: a recurrent layer that runs as one kernel, if there is one.
        convolutions: how many of the kernels are convolutions, or their gradients.
        samples: the number of samples in a minibatch, on average.
        stacked: the kernels and bytes of the same work in a stack, of which there may be more; None if not counted.
    """

    kernels: float = 0
    flops: float = 0.0
    bytes: float = 0.0
    fused: str | None = None
    convolutions: float = 0
    samples: float = 1.0
    stacked: StepCost | None = None

    def per_step(self, sizes: Sequence[int]) -> StepCost:
        """The cost of one of several steps.

        Args:
            sizes: the size of the minibatch of each.
        """
        steps = len(sizes)
        each = self.kernels / steps, self.flops / steps, self.bytes / steps
        return StepCost(*each, self.fused, self.convolutions / steps, sum(sizes) / steps)


class CostCounter(TorchDispatchMode):
    """Counts the cost of everything that torch does in its ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = StepCost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one kernel, and run it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        name = packet.__name__
        if func.is_view or name in ("detach", "alias"):
            return out
        self.cost.kernels += 1
        self.cost.convolutions += "convolution" in name
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.cost.bytes += sum(tensor.numel() * tensor.element_size() for tensor in written)
        if packet in flop_registry:
            self.cost.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif "rnn" in name or "lstm" in name or "gru" in name:
            self.cost.fused = name
        return out
