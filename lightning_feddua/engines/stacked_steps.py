"""Local steps of a stack of clients: loss and gradient are vmapped, the optimizer runs on the stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from lightning_feddua._private import NO_BATCHING_RULE, tree_map
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.engines.base import Clipping
from lightning_feddua.engines.local_rounds import LocalRounds, take_rows
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stack_log import StackLog
from lightning_feddua.engines.stack_parts import Part, PartBatch, merged
from lightning_feddua.engines.substitution import Substitution
from lightning_feddua.errors import UnequalClientsError
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.log_capture import LogCapture
from lightning_feddua.host.log_options import LogOptions
from lightning_feddua.host.training_step import TrainingStep
from lightning_feddua.randomness import random_state, set_random_state


class Ended(NamedTuple):
    """Clients of a stack that have made their last step at the same time.

    Args:
        rows: their places in the stack.
        local: what the algorithm knows of them.
        metrics: what they have logged, a row each.
    """

    rows: slice
    local: LocalRound
    metrics: dict[str, Tensor]


class _Found(NamedTuple):
    """What a part's step finds: gradients (None for parameters that it does not use), losses, logs and buffers."""

    gradients: Mapping[str, Tensor | None]
    losses: Tensor
    logs: dict[str, Tensor]
    buffers: dict[str, Tensor]
    weights: dict[str, float]


class StackedSteps:
    """Makes local steps of all clients of a stack at once.

    Args:
        federation: the module and its clients.
        algorithm: what clients do.
        rounds: the algorithm's part of the steps.
        attach: makes the optimizer work on a stack.
    """

    def __init__(
        self,
        federation: Federation,
        algorithm: LocalTraining,
        rounds: LocalRounds,
        attach: Callable[[ClientStack], None],
    ) -> None:
        self._federation = federation
        self._algorithm = algorithm
        self._rounds = rounds
        self._attach = attach
        self._module = federation.module
        self._optimizer = federation.optimizers.optimizers[0]
        self._step_module = TrainingStep(self._module)
        self._capture = LogCapture(federation.fabric.device)
        self._forward_can_be_vmapped = True
        self._unused: set[str] | None = None

    @property
    def log_options(self) -> dict[str, LogOptions]:
        """How the module has logged in the last steps that were not compiled, by name."""
        return self._capture.options

    def run(
        self,
        stack: ClientStack,
        batches: Iterable[tuple[int, list[PartBatch]]],
        local: LocalRound,
        clip: Clipping | None,
        same_size: bool,
    ) -> list[Ended]:
        """Make a step for each stacked minibatch; return the clients in the order in which they end.

        Args:
            stack: the clients, those with the most steps first, with the optimizer working on them.
            batches: minibatches with the number of the pass over the data that each belongs to.
            local: what the algorithm knows.
            clip: how gradients are clipped; None for no clipping.
            same_size: whether all clients are at the same place in their data.
        """
        federation, view = self._federation, self._federation.view
        log, ended = StackLog(), list[Ended]()
        epoch = -1
        self._substitution = Substitution(self._step_module)
        with self._capture.attached(self._module):
            for index, (new_epoch, parts) in enumerate(batches):
                if new_epoch != epoch:
                    if epoch >= 0:
                        federation.optimizers.step_schedulers("epoch", epoch + 1)
                    epoch, first = new_epoch, index
                    view.current_epoch = epoch if same_size else None
                view.batch_idx = index - first if same_size else None
                if (active := sum(len(part.rows) for part, _ in parts)) < stack.active:
                    ended.append(self._end(stack, active, local, log))
                self._step(stack, parts, index - first if same_size else _UNKNOWN, log, local, clip)
                federation.optimizers.step_schedulers("step", index - first + 1)
                view.global_step += 1
        stack.complete()
        return [*ended, Ended(slice(0, stack.active), local, log.end(0))]

    def _end(self, stack: ClientStack, active: int, local: LocalRound, log: StackLog) -> Ended:
        """Let the last clients of a stack end, and the others go on, each with the optimizer's state of its own."""
        size, state = stack.active, self._optimizer.state
        rows = slice(active, size)
        ended = Ended(rows, take_rows(local, rows, size), log.end(active))
        vars(local).update(vars(take_rows(local, slice(0, active), size)))
        before = stack.by_parameter
        stack.shrink(active)
        for key, parameter in stack.by_parameter.items():
            known = state.pop(before[key], {})
            own = {name: value[:active] if _has_shape(value, before[key]) else value for name, value in known.items()}
            if own:
                state[parameter] = own
        self._attach(stack)
        return ended

    def _step(
        self,
        stack: ClientStack,
        parts: list[PartBatch],
        batch_idx: Any,
        log: StackLog,
        local: LocalRound,
        clip: Clipping | None,
    ) -> None:
        decayed = self._federation.optimizers.decayed(self._optimizer)
        if self._algorithm.needs_anchor_gradient:
            local.anchor_gradient = self._anchor_gradient(stack, parts, batch_idx, local)
        found = [self._differentiate(stack, own, stack.leaves_of(own.part.taken), batch_idx) for own in parts]
        if self._capture.metrics:
            raise TypeError(f"the metric `{next(iter(self._capture.metrics))}` keeps a state of its own")
        self._put_together(stack, [part for part, _ in parts], found, log)
        if clip is not None:
            stack.clip_gradients(clip)
        if self._algorithm.corrects:
            self._rounds.correct(stack.flat_gradients(), stack.weights, local)
        self._optimizer.step()
        if decayed is not None:
            decayed.undo()
        self._rounds.project(stack.weights, local)
        local.step += 1

    def _put_together(self, stack: ClientStack, parts: list[Part], found: list[_Found], log: StackLog) -> None:
        """Give the stack the gradients and buffers of its parts, and take down what they have logged."""
        size, first = stack.active, found[0]
        for name, gradient in _merged_gradients(parts, [own.gradients for own in found], size).items():
            stack.parameters[name].grad = gradient
        stack.buffers = {
            name: merged(parts, [own.buffers[name] for own in found], size, in_place=True) for name in stack.buffers
        }
        if "loss" not in first.logs:
            log.add("loss", "mean", parts, [own.losses for own in found], [1.0] * len(parts), size)
        for own in found:
            if own.logs.keys() != first.logs.keys():
                name = next(iter(own.logs.keys() ^ first.logs.keys()))
                raise TypeError(f"its training step logs `{name}` for some minibatches only")
        for name in first.logs:
            values, weights = [own.logs[name] for own in found], [own.weights[name] for own in found]
            log.add(name, self._capture.kinds[name], parts, values, weights, size)

    def _anchor_gradient(self, stack: ClientStack, parts: list[PartBatch], batch_idx: Any, local: LocalRound) -> Tensor:
        """The gradients of the present minibatches at the global weights; the step then draws the same numbers."""
        device = self._federation.fabric.device
        before = random_state(device)
        found = [
            self._differentiate(stack, own, stack.at(local.anchor, own.part.taken), batch_idx).gradients
            for own in parts
        ]
        set_random_state(device, before)
        gradients = _merged_gradients([part for part, _ in parts], found, stack.active)
        flat = torch.zeros_like(stack.weights)
        self._federation.parameters.gather([gradients[name] for name in stack.parameters], flat)
        return flat

    def _differentiate(
        self, stack: ClientStack, own: PartBatch, parameters: Mapping[str, Tensor], batch_idx: Any
    ) -> _Found:
        """What a part of a stack finds.

        The gradient of the sum of the clients' losses is the stack of their gradients, and one backward pass after a
        vmapped forward pass is the fastest way to it. Fused kernels such as an LSTM's can be vmapped only together with
        their gradient.
        """
        capture = self._capture
        substitution = self._substitution
        weights: dict[str, float] = {}

        def function(
            parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
        ) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
            capture.start()
            capture.start_batch(batch)
            # Copies, because a step may write to them and `torch.func.grad` forbids that for what comes from outside.
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            with substitution.of({**parameters, **buffers}):
                loss = self._step_module(batch, batch_idx)
            values = capture.values()
            weights.update({name: weight for name, (_, weight) in values.items()})
            return loss, ({name: value for name, (value, _) in values.items()}, buffers)

        part, batch = own
        buffers = stack.buffers_of(part.taken)
        context = self._federation.fabric.strategy.precision.forward_context
        if self._forward_can_be_vmapped or part.alone:
            step = function if part.alone else vmap(function, randomness="different")
            try:
                with context():
                    losses, (logs, new_buffers) = step(parameters, buffers, batch)
                found = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
                new_buffers = {name: buffer.detach() for name, buffer in new_buffers.items()}
                gradients = dict(zip(parameters, found, strict=True))
                return _Found(gradients, losses.detach(), logs, new_buffers, weights)
            except RuntimeError as error:
                if NO_BATCHING_RULE not in str(error):
                    raise
                self._forward_can_be_vmapped = False
        if self._unused is None:
            self._unused = self._find_unused(batch)
        with context():
            both = vmap(grad_and_value(function, has_aux=True), randomness="different")
            values = {name: parameter.detach() for name, parameter in parameters.items()}
            stacked, (losses, (logs, new_buffers)) = both(values, buffers, batch)
        used = {name: None if name in self._unused else value for name, value in stacked.items()}
        return _Found(used, losses, logs, new_buffers, weights)

    def _find_unused(self, batch: Any) -> set[str]:
        """Parameters that a step does not use: they have no gradient, which is not the same as a zero one."""
        first = tree_map(lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf, batch)
        self._federation.buffers.restore()
        with self._federation.fabric.strategy.precision.forward_context():
            loss = self._step_module(first, 0)
        names, parameters = zip(*self._federation.parameters.named(self._module), strict=True)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {f"module.{name}" for name, gradient in zip(names, gradients, strict=True) if gradient is None}


def _merged_gradients(
    parts: list[Part], found: list[Mapping[str, Tensor | None]], size: int
) -> Mapping[str, Tensor | None]:
    """The gradients of all clients, a row each."""
    if len(found) == 1 and parts[0].covers(size):
        return found[0]
    gradients: dict[str, Tensor | None] = {}
    for name in found[0]:
        values = [value for own in found if (value := own[name]) is not None]
        if values and len(values) < len(found):
            raise TypeError(f"its training step uses `{name.removeprefix('module.')}` for some minibatches only")
        gradients[name] = merged(parts, values, size, in_place=True) if values else None
    return gradients


def _has_shape(value: Any, parameter: Tensor) -> bool:
    """Whether an entry of an optimizer's state belongs to the elements of a parameter, and not to all of it."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


class _Unknown:
    """In place of the number of a minibatch where clients are at different ones: any use of it is an error."""

    def _refuse(self, *args: Any) -> Any:
        raise UnequalClientsError(
            "its training step uses `batch_idx`, which differs between clients of different sizes"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = __float__ = __hash__ = (
        _refuse
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __str__ = __repr__ = __format__ = _refuse


_UNKNOWN = _Unknown()
