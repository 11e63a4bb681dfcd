"""Compiled local steps of a stack, and what they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_feddua._private import tree_flatten, tree_unflatten
from lightning_feddua.clients.local_training import LocalRound
from lightning_feddua.engines.local_rounds import take_rows
from lightning_feddua.engines.recorded_reads import RecordedReads
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stacked_steps import Ended


@dataclass
class StepInputs:
    """Everything that local steps depend on and that changes between rounds, but for Python attributes.

    Args:
        matrix: the clients' weights.
        buffers: their buffers.
        batches: their minibatches.
        lr_factor: multiplies the module's learning rates.
        anchor: as in :class:`LocalRound`, and so for the next four.
        state: what each client keeps.
        scratch: what the algorithm keeps for the round.
        scalars: what clients send.
        full_gradient: of all their data.
        vectors: what each algorithm keeps between rounds.
        numbers: the same, for numbers.
    """

    matrix: Tensor
    buffers: dict[str, Tensor]
    batches: list[Any]
    lr_factor: Tensor
    anchor: Tensor
    state: dict[str, Tensor]
    scratch: dict[str, Tensor]
    scalars: dict[str, Tensor]
    full_gradient: Tensor | None
    vectors: list[dict[str, Tensor]]
    numbers: list[dict[str, Tensor]]

    def flatten(self) -> tuple[list[Any], Any]:
        """All leaves, and how to put them together again."""
        return tree_flatten(vars(self))


@dataclass
class CompiledFunction:
    """Compiled local steps.

    Args:
        function: takes the tensors among the inputs, and changes the clients' weights and state in place.
        spec: how to read what it returns.
        ended: the places of the clients that end at the same time, and the number of their steps.
        reads: the attributes whose values are constants of the function.
    """

    function: Callable[..., Any]
    spec: Any
    ended: list[tuple[slice, int]]
    reads: RecordedReads

    def __call__(self, tensors: list[Tensor], stack: ClientStack, local: LocalRound) -> list[Ended]:
        """Make the local steps; return the clients as :meth:`StackedSteps.run` does."""
        outputs = tree_unflatten(list(self.function(*tensors)), self.spec)
        stack.buffers = outputs["buffers"]
        found = []
        for (rows, steps), own in zip(self.ended, outputs["ended"], strict=True):
            known = replace(take_rows(local, rows, stack.size), step=steps)
            known.scratch.update(own["scratch"])
            known.scalars.update(own["scalars"])
            found.append(Ended(rows, known, own["metrics"]))
        return found
