"""All local steps of a stack of clients as one compiled function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stacked_steps import StackedSteps
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import random_state, set_random_state

# Relative difference of compiled and eager updates that counts as the same result. In float32 a flipped ReLU alone
# makes 1 % of a deep network's update; a wrong gradient makes 100 %.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 0.05, torch.bfloat16: 0.1}
# Each shape of a stack is compiled on its own, which takes from seconds to minutes.
_MAX_SHAPES = 4


@dataclass
class _Compiled:
    """A compiled function of flat inputs, and how to read its flat outputs."""

    function: Callable[..., Any]
    spec: Any


class CompiledSteps:
    """Traces what :class:`StackedSteps` does, from the first local step to the last, and compiles the trace.

    The trace is of tensor operations alone, so that the module's own training step, its optimizer and the client
    algorithm need not be known to the compiler. Learning rates, minibatches and everything that the algorithm keeps are
    inputs. For each new shape the compiled function is compared with the eager one on the real minibatches before it is
    trusted; where something cannot be compiled, or differs, clients are trained eagerly from then on, and one warning
    says why.

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
        self._algorithm = algorithm
        self._steps = steps
        self._attach = attach
        self._compiled: dict[Any, _Compiled | None] = {}
        self._given_up = self._obstacle()
        if self._given_up is not None:
            self._warn(self._given_up)

    def _obstacle(self) -> str | None:
        if self._federation.optimizers.schedulers:
            return "a scheduler changes learning rates between local steps"
        if self._algorithm.numbers:
            return f"`{type(self._algorithm).__name__}` keeps numbers that change between rounds"
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(self._algorithm.attributes())):
            return f"`{type(self._algorithm).__name__}` keeps tensors outside its `vectors`"
        return None

    @staticmethod
    def _warn(reason: str) -> None:
        rank_zero_warn(f"The local steps are not compiled: {reason}. Clients are trained eagerly.")

    def run(
        self,
        stack: ClientStack,
        batches: Iterator[tuple[int, Any]],
        local: LocalRound,
        clip: float | None,
        same_size: bool,
        lr_factor: float,
    ) -> dict[str, Tensor]:
        """As :meth:`StackedSteps.run`, with all minibatches in memory.

        Args:
            stack: the clients.
            batches: their minibatches.
            local: what the algorithm knows.
            clip: the largest norm of a gradient.
            same_size: whether all clients are at the same place in their data.
            lr_factor: multiplies the module's learning rates.
        """
        if self._given_up is not None:
            return self._steps.run(stack, batches, local, clip, same_size)
        kept = list(batches)
        epochs = [epoch for epoch, _ in kept] if same_size else len(kept)
        inputs = _Inputs(
            stack.matrix,
            stack.buffers,
            [batch for _, batch in kept],
            torch.tensor(lr_factor, dtype=torch.float64, device=stack.matrix.device),
            local.anchor,
            local.state,
            local.scratch,
            local.full_gradient,
            self._algorithm.vectors,
        )
        leaves, spec = tree_flatten(vars(inputs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # What is not a tensor becomes a constant of the trace.
        constants = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        attributes = self._algorithm.attributes()
        constants += [f"{k}={v}" for k, v in attributes.items() if isinstance(v, bool | int | float | str)]
        shapes = tuple((tuple(t.shape), t.dtype, t.stride()) for t in tensors)
        key = (str(epochs), str(clip), shapes, str(spec), tuple(constants))
        if key in self._compiled:
            compiled = self._compiled[key]
            if compiled is None:
                return self._steps.run(stack, iter(kept), local, clip, same_size)
            return self._call(compiled, tensors, stack, local, len(kept))
        return self._try(key, inputs, leaves, spec, [epoch for epoch, _ in kept], stack, local, clip, same_size)

    def _try(
        self,
        key: Any,
        inputs: _Inputs,
        leaves: list[Any],
        spec: Any,
        epochs: list[int],
        stack: ClientStack,
        local: LocalRound,
        clip: float | None,
        same_size: bool,
    ) -> dict[str, Tensor]:
        """Compile for a new shape, and compare with the eager steps, whose result counts."""
        if len(self._compiled) >= _MAX_SHAPES:
            if len(self._compiled) == _MAX_SHAPES:
                rank_zero_warn(
                    f"The local steps of {_MAX_SHAPES} stacks of different shapes are compiled, and others appear."
                    " Those are trained eagerly; clients of at least `batch_size` samples have the same shape."
                )
            self._compiled[key] = None
            return self._steps.run(stack, zip(epochs, inputs.batches, strict=True), local, clip, same_size)
        device = self._federation.fabric.device
        before = random_state(device)
        start = stack.matrix.clone()
        trial = replace(local, state={k: v.clone() for k, v in local.state.items()}, scratch=dict(local.scratch))
        trial_stack = ClientStack(self._federation, start.clone())
        trial_stack.buffers = dict(stack.buffers)
        found: dict[str, Tensor] | None = None
        try:
            compiled = self._compile(leaves, spec, epochs, clip, same_size)
            set_random_state(device, before)
            trial_inputs = replace(inputs, matrix=trial_stack.matrix, state=trial.state, scratch=trial.scratch)
            tensors = [leaf for leaf in tree_leaves(vars(trial_inputs)) if isinstance(leaf, Tensor)]
            found = self._call(compiled, tensors, trial_stack, trial, len(epochs))
        except Exception as error:
            reason = " ".join(str(error).split())[:200].rstrip(".")
            self._given_up = f"{type(error).__name__}: {reason}"
        self._attach(stack)
        set_random_state(device, before)
        expected = self._steps.run(stack, zip(epochs, inputs.batches, strict=True), local, clip, same_size)
        if found is not None:
            difference = _difference(stack.matrix - start, trial_stack.matrix - start)
            if difference <= TOLERANCE[start.dtype] and found.keys() == expected.keys():
                self._compiled[key] = compiled
                return expected
            self._given_up = f"the compiled updates differ from the eager ones by {difference:.1e}"
            if not all(map(torch.equal, before, random_state(device))):
                self._given_up = "they draw random numbers, which a compiled function draws otherwise"
        self._warn(str(self._given_up))
        return expected

    def _compile(
        self, leaves: list[Any], spec: Any, epochs: list[int], clip: float | None, same_size: bool
    ) -> _Compiled:
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        outputs_spec: list[Any] = []

        def function(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            filled = [next(given) if is_one else leaf for is_one, leaf in zip(is_tensor, leaves, strict=True)]
            outputs = self._trace(_Inputs(**tree_unflatten(filled, spec)), epochs, clip, same_size)
            flat, output_spec = tree_flatten(outputs)
            outputs_spec.append(output_spec)
            return flat

        # Only here: without a compiler, the import of this package costs little more than Lightning's.
        import torch._inductor
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        examples = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # With an environment for shapes, although none varies: without one the compiler does not use its cache on disk.
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        with self._untouched(), _quiet():
            graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
            with tracing(TracingContext(mode)):
                # Random numbers as the eager steps draw them.
                fakes: list[Any] = [mode.from_tensor(example, static_shapes=True) for example in examples]
                # The number of threads is a part of what is compiled, and so of its name in the cache.
                options = {"fallback_random": True, "cpp.threads": torch.get_num_threads()}
                compiled = torch._inductor.compile(graph, fakes, options=options)
        return _Compiled(compiled, outputs_spec[-1])

    def _trace(self, inputs: _Inputs, epochs: list[int], clip: float | None, same_size: bool) -> dict[str, Any]:
        """The local steps on whatever tensors are given; the stack's matrix is changed in place."""
        optimizers = self._federation.optimizers
        optimizers.reset()
        stack = ClientStack(self._federation, inputs.matrix)
        stack.buffers = inputs.buffers
        self._attach(stack)
        for group in optimizers.optimizers[0].param_groups:
            # The implementations that take a tensor as learning rate, and keep their counts in tensors.
            group.update(lr=group["lr"] * inputs.lr_factor.to(inputs.matrix.dtype), foreach=True)
            group.update({key: value for key, value in (("fused", None), ("capturable", True)) if key in group})
        local = LocalRound(
            inputs.anchor,
            optimizers.optimizers[0].param_groups[0]["lr"],
            state=inputs.state,
            scratch=dict(inputs.scratch),
            full_gradient=inputs.full_gradient,
        )
        self._algorithm.vectors = inputs.vectors
        metrics = self._steps.run(stack, zip(epochs, inputs.batches, strict=True), local, clip, same_size)
        return {"metrics": metrics, "buffers": stack.buffers, "scratch": local.scratch}

    def _call(
        self, compiled: _Compiled, tensors: list[Tensor], stack: ClientStack, local: LocalRound, steps: int
    ) -> dict[str, Tensor]:
        outputs = tree_unflatten(list(compiled.function(*tensors)), compiled.spec)
        stack.buffers = outputs["buffers"]
        local.scratch.update(outputs["scratch"])
        local.step = steps
        return outputs["metrics"]

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Give back what tracing puts tensors without values into."""
        vectors = self._algorithm.vectors
        groups = [dict(group) for group in self._federation.optimizers.optimizers[0].param_groups]
        view = self._federation.view
        step = view.global_step
        with ExitStack() as stack:
            stack.enter_context(torch.compiler._compile_session_context())
            try:
                yield
            finally:
                self._algorithm.vectors = vectors
                view.global_step = step
                optimizer = self._federation.optimizers.optimizers[0]
                optimizer.state.clear()
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.update(before)


@dataclass
class _Inputs:
    """Everything that local steps depend on and that changes between rounds."""

    matrix: Tensor
    buffers: dict[str, Tensor]
    batches: list[Any]
    lr_factor: Tensor
    anchor: Tensor
    state: dict[str, Tensor]
    scratch: dict[str, Tensor]
    full_gradient: Tensor | None
    vectors: dict[str, Tensor]


def _difference(expected: Tensor, found: Tensor) -> float:
    return ((expected - found).norm() / expected.norm().clamp_min(1e-30)).item()


@contextmanager
def _quiet() -> Iterator[None]:
    """The compiler reports on its own progress, which is of no use to the user."""
    logger = logging.getLogger("torch._inductor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
