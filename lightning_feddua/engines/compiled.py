"""Compiled local steps of stacks of clients, checked against the eager ones before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_feddua._private import tree_map, tree_unflatten
from lightning_feddua.agreement import UPDATE_TOLERANCE, relative_difference, short_reason, warn_not_compiled
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.data.client_data import ReusableBatch
from lightning_feddua.engines.base import Clipping
from lightning_feddua.engines.compiled_function import CompiledFunction, StepInputs
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stack_parts import Part, PartBatch, StackPlan
from lightning_feddua.engines.stacked_steps import Ended, StackedSteps
from lightning_feddua.engines.traced_steps import TracedSteps
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import random_state, set_random_state

# How many functions are compiled at most, which takes from seconds to minutes each.
_MAX_FUNCTIONS = 4
# How many steps of parts of a stack of unequal clients are compiled into one function at most.
_MAX_PARTS = 40


class CompiledSteps:
    """Runs local steps compiled where it can, and eagerly elsewhere.

    Each shape of a stack has a compiled function of its own. Learning rates, minibatches and everything that the
    algorithm keeps in ``vectors`` and ``numbers`` are inputs of it; other attributes that the steps read are constants,
    and it is used only while they have the same values. A new function is compared with the eager steps on the real
    minibatches before it is trusted. Where something cannot be compiled, or differs, clients are trained eagerly from
    then on, and one warning says why.

    Args:
        federation: the module and its clients.
        algorithm: what clients do.
        steps: the eager steps.
        attach: makes the optimizer work on a stack.
    """

    def __init__(
        self,
        federation: Federation,
        algorithm: LocalTraining,
        steps: StackedSteps,
        attach: Callable[[ClientStack], None],
    ) -> None:
        self._federation = federation
        self._steps = steps
        self._traced = TracedSteps(federation, algorithm, steps, attach)
        self._attach = attach
        # By the shapes of the inputs and everything else that is known before a trace.
        self._functions: dict[Any, list[CompiledFunction]] = {}
        # How the clients of stacks are expected to step together; None for in any way.
        self._expected: set[str] | None = None
        self._enough = False
        self._given_up = False
        if (obstacle := self._traced.obstacle()) is not None:
            self._give_up(obstacle)

    def _give_up(self, reason: str) -> None:
        warn_not_compiled("Local training", reason)
        self._given_up = True

    def run(
        self,
        stack: ClientStack,
        batches: Iterator[tuple[int, list[PartBatch]]],
        local: LocalRound,
        clip: Clipping | None,
        same_size: bool,
        lr_factor: float,
    ) -> list[Ended]:
        """As :meth:`StackedSteps.run`, with all minibatches in memory.

        Args:
            stack: the clients.
            batches: their minibatches.
            local: what the algorithm knows.
            clip: how gradients are clipped.
            same_size: whether all clients are at the same place in their data.
            lr_factor: multiplies the module's learning rates.
        """
        if self._given_up:
            return self._steps.run(stack, batches, local, clip, same_size)
        kept = list(batches)
        epochs = [epoch for epoch, _ in kept]
        parts = [[part for part, _ in step] for _, step in kept]
        inputs = self._traced.inputs(stack, [[batch for _, batch in step] for _, step in kept], local, lr_factor)
        leaves, spec = inputs.flatten()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = tuple((tuple(t.shape), t.dtype, t.stride()) for t in tensors)
        # What is not a tensor becomes a constant of the trace.
        constants = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        key = (str(epochs if same_size else len(epochs)), str(parts), str(clip), shapes, str(spec), constants)
        if not self._is_expected(parts):
            self._warn_of_others(None)
            return self._steps.run(stack, iter(kept), local, clip, same_size)
        known = self._functions.setdefault(key, [])
        changed: str | None = None
        for function in known:
            changed = function.reads.changed()
            if changed is None:
                return function(tensors, stack, local)
        if sum(map(len, self._functions.values())) >= _MAX_FUNCTIONS:
            self._warn_of_others(changed)
            return self._steps.run(stack, iter(kept), local, clip, same_size)
        return self._try(known, inputs, epochs, parts, stack, local, clip, same_size)

    def expect(self, plans: Sequence[StackPlan]) -> None:
        """Compile nothing but steps like these, those of the first round, so that a resumed run compiles the same."""
        self._expected = {str([parts for _, parts in plan.steps()]) for plan in plans}

    def _is_expected(self, parts: list[list[Part]]) -> bool:
        """Whether such steps are compiled, which takes minutes for long ones of unequal clients."""
        if self._expected is not None and str(parts) not in self._expected:
            return False
        return sum(map(len, parts)) <= max(_MAX_PARTS, len(parts))

    def _warn_of_others(self, changed: str | None) -> None:
        """Say once what keeps bringing up steps that are not compiled yet."""
        if self._enough:
            return
        self._enough = True
        if changed is None:
            reason = (
                "their stacks have other shapes than those of the first round, more than"
                f" {_MAX_FUNCTIONS} shapes, or more than {_MAX_PARTS} steps of unequal clients. With `local_steps`,"
                " clients of at least `batch_size` samples have the same shape"
            )
        else:
            reason = (
                f"`{changed}` changes between rounds, and compiled steps hold for one value. A client algorithm should"
                " keep such a number in `self.numbers`"
            )
        warn_not_compiled("The local training of some clients", reason)

    def _try(
        self,
        known: list[CompiledFunction],
        inputs: StepInputs,
        epochs: list[int],
        parts: list[list[Part]],
        stack: ClientStack,
        local: LocalRound,
        clip: Clipping | None,
        same_size: bool,
    ) -> list[Ended]:
        """Compile a new function, and compare it with the eager steps. Its result counts if it is right.

        A run that is resumed compiles it anew, in another round, and must get the same bits.
        """
        device = self._federation.fabric.device
        before, start = random_state(device), stack.matrix.clone()
        function: CompiledFunction | None = None
        reason = self._traced.obstacle()
        if reason is None:
            try:
                function = self._traced.compile(inputs, epochs, parts, clip, same_size)
                set_random_state(device, before)
                copy, found = self._call_on_copies(function, inputs, local)
            except Exception as error:
                reason = f"{type(error).__name__}: {short_reason(error)}"
        self._attach(stack)
        set_random_state(device, before)
        # Copies of their own for each step, in case a step writes to them.
        batches = [ReusableBatch(tree_map(_cloned, batch)) for batch in inputs.batches]
        steps = zip(epochs, parts, batches, strict=True)
        pairs = ((epoch, list(map(PartBatch, own, reusable.batch))) for epoch, own, reusable in steps)
        expected = self._steps.run(stack, pairs, local, clip, same_size)
        if reason is None and not all(batch.untouched for batch in batches):
            reason = "the training step writes to its batch"
        if reason is None:
            difference = relative_difference([stack.matrix - start], [copy.matrix - start])
            names = [[one.metrics.keys() for one in ended] for ended in (expected, found)]
            if difference <= UPDATE_TOLERANCE[start.dtype] and names[0] == names[1]:
                assert function is not None
                known.append(function)
                stack.matrix.copy_(copy.matrix)
                stack.buffers = copy.buffers
                return found
            reason = f"the compiled updates differ from the eager ones by {difference:.1e}"
            if not all(map(torch.equal, before, random_state(device))):
                reason = "the steps draw random numbers, which a compiled function draws otherwise"
        self._give_up(reason)
        return expected

    def _call_on_copies(
        self, function: CompiledFunction, inputs: StepInputs, local: LocalRound
    ) -> tuple[ClientStack, list[Ended]]:
        """A copy of the clients after compiled steps, and how they have ended; nothing else is changed."""
        leaves, spec = inputs.flatten()
        leaves = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        copies = StepInputs(**tree_unflatten(leaves, spec))
        stack = ClientStack(self._federation, copies.matrix)
        own = replace(local, state=copies.state, scratch=copies.scratch, scalars=dict(copies.scalars))
        return stack, function([leaf for leaf in leaves if isinstance(leaf, Tensor)], stack, own)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which a compiled function relies on; an expanded tensor cannot be written to."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
