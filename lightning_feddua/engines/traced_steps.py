"""All local steps of a stack of clients traced as one graph of tensor operations, and compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_feddua._private import (
    COMPILER_LOGGER,
    EAGER_RANDOM_NUMBERS,
    TRACER_LOGGER,
    compile_graph,
    compile_session,
    threads_option,
    trace,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.engines.base import Clipping
from lightning_feddua.engines.compiled_function import CompiledFunction, StepInputs
from lightning_feddua.engines.recorded_reads import RecordedReads
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stack_parts import Part, PartBatch
from lightning_feddua.engines.stacked_steps import StackedSteps
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.hidden.hidden_state import plain_attributes
from lightning_feddua.host.hidden.snapshot import is_torchs_own
from lightning_feddua.vectors import scalar_dtype


class TracedSteps:
    """Traces what :class:`StackedSteps` does, from the first local step to the last.

    The trace is of tensor operations alone, so that the module's own training step, its optimizer and the client
    algorithm need not be known to the compiler.

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
        # The algorithm, and those that it is composed of.
        self._algorithms = _with_parts(algorithm)
        self._steps = steps
        self._attach = attach

    def obstacle(self) -> str | None:
        """Why the steps cannot be compiled, as far as can be told without a trace; None if nothing is known."""
        if self._federation.optimizers.schedulers:
            return "a scheduler changes learning rates between local steps"
        for algorithm in self._algorithms:
            attributes = {name: value for name, value in vars(algorithm).items() if name not in ("vectors", "numbers")}
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(attributes)):
                return f"`{type(algorithm).__name__}` keeps tensors outside its `vectors`"
        return None

    def inputs(self, stack: ClientStack, batches: list[Any], local: LocalRound, lr_factor: float) -> StepInputs:
        """What the local steps of a stack depend on."""

        def numbers(values: dict[str, Any]) -> dict[str, Tensor]:
            device = stack.matrix.device
            dtype = scalar_dtype(device)
            return {name: torch.as_tensor(value, dtype=dtype, device=device) for name, value in values.items()}

        return StepInputs(
            stack.matrix,
            stack.buffers,
            batches,
            numbers({"lr_factor": lr_factor})["lr_factor"],
            local.anchor,
            local.state,
            local.scratch,
            numbers(local.scalars),
            local.full_gradient,
            [algorithm.vectors for algorithm in self._algorithms],
            [numbers(algorithm.numbers) for algorithm in self._algorithms],
        )

    def compile(
        self,
        inputs: StepInputs,
        epochs: list[int],
        parts: list[list[Part]],
        clip: Clipping | None,
        same_size: bool,
    ) -> CompiledFunction:
        """Compile the steps for inputs of these shapes, and for the present values of the attributes that they read.

        Args:
            inputs: examples of the inputs.
            epochs: the pass over the data that each minibatch belongs to.
            parts: the parts of the stack in each step.
            clip: how gradients are clipped.
            same_size: whether all clients are at the same place in their data.
        """
        leaves, spec = inputs.flatten()
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        outputs_spec: list[Any] = []
        places: list[tuple[slice, int]] = []

        def function(*tensors: Tensor) -> list[Tensor]:
            given = iter(tensors)
            filled = [next(given) if is_one else leaf for is_one, leaf in zip(is_tensor, leaves, strict=True)]
            given_again = StepInputs(**tree_unflatten(filled, spec))
            batches = [list(map(PartBatch, *pair)) for pair in zip(parts, given_again.batches, strict=True)]
            outputs, places[:] = self._trace(given_again, zip(epochs, batches, strict=True), clip, same_size)
            flat, output_spec = tree_flatten(outputs)
            outputs_spec.append(output_spec)
            return flat

        examples = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        reads = self._reads()
        # The number of threads is a part of what is compiled, and so of its name in the compiler's cache.
        options = {**EAGER_RANDOM_NUMBERS, **threads_option(torch.get_num_threads())}
        with _quiet(), compile_session():
            with self._untouched(), reads.recording():
                graph = trace(function, examples)
            compiled = compile_graph(graph, examples, options)
        return CompiledFunction(compiled, outputs_spec[-1], places, reads)

    def _trace(
        self,
        inputs: StepInputs,
        batches: Iterable[tuple[int, list[PartBatch]]],
        clip: Clipping | None,
        same_size: bool,
    ) -> tuple[dict[str, Any], list[tuple[slice, int]]]:
        """The local steps on whatever tensors are given; the stack's matrix is changed in place."""
        optimizers = self._federation.optimizers
        optimizers.reset()
        stack = ClientStack(self._federation, inputs.matrix)
        stack.buffers = inputs.buffers
        self._attach(stack)
        dtype = torch.promote_types(inputs.matrix.dtype, torch.float32)
        for group in optimizers.optimizers[0].param_groups:
            # The implementations that take a tensor as learning rate, and keep their counts in tensors.
            group.update(lr=group["lr"] * inputs.lr_factor.to(dtype), foreach=True)
            group.update({key: value for key, value in (("fused", None), ("capturable", True)) if key in group})
        local = LocalRound(
            inputs.anchor,
            optimizers.optimizers[0].param_groups[0]["lr"],
            state=inputs.state,
            scratch=dict(inputs.scratch),
            full_gradient=inputs.full_gradient,
            scalars=dict(inputs.scalars),
        )
        for algorithm, vectors, numbers in zip(self._algorithms, inputs.vectors, inputs.numbers, strict=True):
            algorithm.vectors, algorithm.numbers = vectors, numbers  # type: ignore[assignment]
        ended = self._steps.run(stack, batches, local, clip, same_size)
        outputs = [
            {
                "metrics": metrics,
                "scratch": own.scratch,
                "scalars": {
                    name: value if isinstance(value, Tensor) else inputs.lr_factor.new_full((), value)
                    for name, value in own.scalars.items()
                },
            }
            for _, own, metrics in ended
        ]
        return {"buffers": stack.buffers, "ended": outputs}, [(rows, own.step) for rows, own, _ in ended]

    def _reads(self) -> RecordedReads:
        """Records what the steps read of the algorithm, the trainer and the module."""
        owners: dict[str, object] = {"self.trainer": self._federation.view}
        for i, algorithm in enumerate(self._algorithms):
            owners[f"{type(algorithm).__name__}{f' {i}' * (i > 0)}"] = algorithm
        opaque: dict[str, object] = {}
        root = type(self._federation.module).__name__
        for path, module in self._federation.module.named_modules():
            kind = opaque if is_torchs_own(module) or isinstance(module, Metric) else owners
            kind[f"{root}.{path}".rstrip(".")] = module
        registries = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
        # Vectors and numbers are inputs; what logs is set for each stack.
        return RecordedReads(owners, opaque, leave_out=["vectors", "numbers", "log", *registries])

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Give back what tracing puts tensors without values into, and refuse changes that a trace does not hold."""
        module, view = self._federation.module, self._federation.view
        optimizers = self._federation.optimizers
        optimizer, lr_factor = optimizers.optimizers[0], optimizers.lr_factor
        attributes = [dict(vars(algorithm)) for algorithm in self._algorithms]
        groups = [dict(group) for group in optimizer.param_groups]
        plain, step = plain_attributes(module), view.global_step
        changed: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(self._federation.hidden_state.undone())
            try:
                yield
                now = plain_attributes(module)
                changed += [f"{type(module).__name__}.{name}" for name in now if now[name] != plain.get(name)]
            finally:
                view.global_step = step
                optimizers.lr_factor = lr_factor
                optimizer.state.clear()
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.update(before)
                for algorithm, own in zip(self._algorithms, attributes, strict=True):
                    names = vars(algorithm).keys() - {"vectors", "numbers"}
                    changed += [
                        f"{type(algorithm).__name__}.{name}"
                        for name in names
                        if name not in own or vars(algorithm)[name] is not own[name]
                    ]
                    vars(algorithm).clear()
                    vars(algorithm).update(own)
        if changed:
            raise TypeError(f"the local steps set `{changed[0]}`, which compiled ones would not")


def _with_parts(algorithm: LocalTraining) -> list[LocalTraining]:
    """An algorithm and the algorithms among its attributes, each once."""
    found = [algorithm]
    for one in found:
        parts = [leaf for leaf in tree_leaves(vars(one)) if isinstance(leaf, LocalTraining)]
        found += [part for part in parts if all(part is not known for known in found)]
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """The compiler reports on its own progress, and the tracer on errors that are reported anyway."""
    loggers = [logging.getLogger(name) for name in (COMPILER_LOGGER, TRACER_LOGGER)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
