"""Local steps of a stack of clients: loss and gradient are vmapped, the optimizer runs on the stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from lightning_feddua._private import NO_BATCHING_RULE, tree_map
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.engines.base import Clipping
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.log_capture import LogCapture
from lightning_feddua.host.log_options import LogOptions
from lightning_feddua.host.training_step import TrainingStep
from lightning_feddua.randomness import random_state, set_random_state


class StackedSteps:
    """Makes local steps of all clients of a stack at once.

    Args:
        federation: the module and its clients.
        algorithm: what clients do.
        rounds: the algorithm's part of the steps.
    """

    def __init__(self, federation: Federation, algorithm: LocalTraining, rounds: LocalRounds) -> None:
        self._federation = federation
        self._algorithm = algorithm
        self._rounds = rounds
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
        batches: Iterable[tuple[int, Any]],
        local: LocalRound,
        clip: Clipping | None,
        same_size: bool,
    ) -> dict[str, Tensor]:
        """Make a step for each stacked minibatch; return what the clients logged.

        Args:
            stack: the clients, with the optimizer working on them.
            batches: minibatches with the number of the pass over the data that each belongs to.
            local: what the algorithm knows.
            clip: how gradients are clipped; None for no clipping.
            same_size: whether all clients are at the same place in their data.
        """
        federation, view = self._federation, self._federation.view
        logged = LogCapture(federation.fabric.device)
        epoch = -1
        with self._capture.attached(self._module):
            for index, (new_epoch, batch) in enumerate(batches):
                if new_epoch != epoch:
                    if epoch >= 0:
                        federation.optimizers.step_schedulers("epoch", epoch + 1)
                    epoch, first = new_epoch, index
                    view.current_epoch = epoch if same_size else None
                view.batch_idx = index - first if same_size else None
                self._step(stack, batch, index - first if same_size else _UNKNOWN, logged, local, clip)
                federation.optimizers.step_schedulers("step", index - first + 1)
                view.global_step += 1
        return {name: value for name, (value, _) in logged.values().items()}

    def _step(
        self,
        stack: ClientStack,
        batch: Any,
        batch_idx: Any,
        logged: LogCapture,
        local: LocalRound,
        clip: Clipping | None,
    ) -> None:
        weights: dict[str, float] = {}
        capture = self._capture
        decayed = self._federation.optimizers.decayed(self._optimizer)

        def loss_and_more(
            parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
        ) -> tuple[Tensor, tuple[dict[str, Tensor], dict[str, Tensor]]]:
            capture.start()
            capture.start_batch(batch)
            # Copies, because a step may write to them and `torch.func.grad` forbids that for what comes from outside.
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
            loss = functional_call(self._step_module, {**parameters, **buffers}, (batch, batch_idx))
            values = capture.values()
            weights.update({name: weight for name, (_, weight) in values.items()})
            return loss, ({name: value for name, (value, _) in values.items()}, buffers)

        if self._algorithm.needs_anchor_gradient:
            local.anchor_gradient = self._anchor_gradient(loss_and_more, stack, batch, local)
        found = self._differentiate(loss_and_more, stack.parameters, stack.buffers, batch)
        gradients, losses, logs, stack.buffers = found
        if capture.metrics:
            raise TypeError(f"the metric `{next(iter(capture.metrics))}` keeps a state of its own")
        for name, parameter in stack.parameters.items():
            parameter.grad = gradients[name]
        if clip is not None:
            stack.clip_gradients(clip)
        if self._algorithm.corrects:
            self._rounds.correct(stack.flat_gradients(), stack.matrix, local)
        self._optimizer.step()
        if decayed is not None:
            decayed.undo()
        self._rounds.project(stack.matrix, local)
        local.step += 1
        if "loss" not in logs:
            logged.accumulate("loss", losses, 1.0)
        for name, value in logs.items():
            logged.accumulate(name, value, weights[name], capture.kinds[name])

    def _anchor_gradient(
        self, function: Callable[..., Any], stack: ClientStack, batch: Any, local: LocalRound
    ) -> Tensor:
        """The gradients of the present minibatches at the global weights; the step then draws the same numbers."""
        device = self._federation.fabric.device
        before = random_state(device)
        gradients = self._differentiate(function, stack.at(local.anchor), stack.buffers, batch)[0]
        set_random_state(device, before)
        flat = torch.zeros_like(stack.matrix)
        self._federation.parameters.gather([gradients[name] for name in stack.parameters], flat)
        return flat

    def _differentiate(
        self, function: Callable[..., Any], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> tuple[dict[str, Tensor | None], Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Gradients (None for parameters that the step does not use), losses, logs and buffers of all clients.

        The gradient of the sum of the clients' losses is the stack of their gradients, and one backward pass after a
        vmapped forward pass is the fastest way to it. Fused kernels such as an LSTM's can be vmapped only together with
        their gradient.
        """
        context = self._federation.fabric.strategy.precision.forward_context
        if self._forward_can_be_vmapped:
            try:
                with context():
                    step = vmap(function, randomness="different")
                    losses, (logs, new_buffers) = step(parameters, buffers, batch)
                found = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
                new_buffers = {name: buffer.detach() for name, buffer in new_buffers.items()}
                return dict(zip(parameters, found, strict=True)), losses.detach(), logs, new_buffers
            except RuntimeError as error:
                if NO_BATCHING_RULE not in str(error):
                    raise
                self._forward_can_be_vmapped = False
        if self._unused is None:
            self._unused = self._find_unused(batch)
        with context():
            step = vmap(grad_and_value(function, has_aux=True), randomness="different")
            values = {name: parameter.detach() for name, parameter in parameters.items()}
            gradients, (losses, (logs, new_buffers)) = step(values, buffers, batch)
        return {n: None if n in self._unused else g for n, g in gradients.items()}, losses, logs, new_buffers

    def _find_unused(self, batch: Any) -> set[str]:
        """Parameters that a step does not use: they have no gradient, which is not the same as a zero one."""
        first = tree_map(lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf, batch)
        self._federation.buffers.restore()
        with self._federation.fabric.strategy.precision.forward_context():
            loss = self._step_module(first, 0)
        names, parameters = zip(*self._federation.parameters.named(self._module), strict=True)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {f"module.{name}" for name, gradient in zip(names, gradients, strict=True) if gradient is None}


class _Unknown:
    """In place of the number of a minibatch where clients are at different ones: any use of it is an error."""

    def _refuse(self, *args: Any) -> Any:
        raise TypeError("its training step uses `batch_idx`, which differs between clients of different sizes")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = __float__ = __hash__ = (
        _refuse
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __str__ = __repr__ = __format__ = _refuse


_UNKNOWN = _Unknown()
