"""Many clients in one step: loss and gradient are vmapped over stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from lightning_feddua.clients.engine import Client, ClientUpdate, GlobalState, Notify
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.clients.rounds import LocalRounds
from lightning_feddua.clients.stack import ClientStack
from lightning_feddua.clients.states import ClientStates
from lightning_feddua.clients.training_step import TRAINING_HOOKS, TrainingStep
from lightning_feddua.data.client_data import minibatches, stacked_batch
from lightning_feddua.errors import ClientError
from lightning_feddua.federation import Federation
from lightning_feddua.log_capture import LogCapture
from lightning_feddua.sampling import Purpose, generator, random_state, seed_generators, set_random_state

# Optimizers that treat each element on its own, so that a stack of clients is to them one larger tensor.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
# Bytes that the stacked weights, gradients and optimizer states of one chunk of clients may take.
MEMORY_BOUND = 1 << 30


class VectorizedEngine:
    """Trains clients together, those whose minibatches have the same shapes in one stack.

    The module's own optimizer runs on the stack of parameters as it would on one client's. Minibatches are those of the
    sequential engine; what is random inside a step (dropout) is drawn for the whole stack at once.

    Args:
        federation: the module and its clients.
        algorithm: what clients do.
        states: what they keep.
    """

    name = "vectorized"

    def __init__(self, federation: Federation, algorithm: LocalTraining, states: ClientStates) -> None:
        self._federation = federation
        self._algorithm = algorithm
        self._rounds = LocalRounds(federation, algorithm, states)
        self._module = federation.module
        self._view = federation.view
        self._optimizer = federation.optimizers.optimizers[0]
        self._own_parameters = [list(group["params"]) for group in self._optimizer.param_groups]
        self._step_module = TrainingStep(self._module)
        self._capture = LogCapture(federation.fabric.device)
        self._stack: ClientStack | None = None
        self._forward_can_be_vmapped = True
        self._unused: set[str] | None = None
        # Clients that fit into one minibatch: who, their samples, and the state of those when they were stacked.
        self._whole: tuple[list[int], Any, list[int]] | None = None
        parameter_bytes = len(federation.parameters) * federation.parameters.vector.element_size()
        # Weights, gradients and the optimizer's state, and what the algorithm adds.
        copies = 4 + 2 * algorithm.corrects + len(algorithm.client_state) + len(algorithm.extra_vectors)
        self._chunk = max(1, MEMORY_BOUND // (copies * parameter_bytes))

    @staticmethod
    def obstacle(federation: Federation, algorithm: LocalTraining) -> str | None:
        """Why a module cannot be vectorized, as far as can be told without running it; None if nothing is known."""
        module = federation.module
        if not module.automatic_optimization:
            return "it optimizes manually"
        optimizer = federation.optimizers.optimizers[0]
        if type(optimizer) not in ELEMENTWISE:
            return f"its optimizer `{type(optimizer).__name__}` is not known to work element by element"
        for name in TRAINING_HOOKS:
            if is_overridden(name, module):
                return f"it overrides `{name}`"
        if not algorithm.supports_vectorized:
            return f"`{type(algorithm).__name__}` does not work on a stack of clients"
        if getattr(federation.fabric.strategy.precision, "scaler", None) is not None:
            return "gradients are scaled in 16-mixed precision"
        return None

    def run(self, clients: list[Client], state: GlobalState, notify: Notify) -> Iterator[ClientUpdate]:
        """Train clients in chunks of equal shapes. `notify` hears of all of a chunk before and after its steps."""
        self._work = state.work
        for group in self._groups(clients):
            for start in range(0, len(group), self._chunk):
                chunk = group[start : start + self._chunk]
                for client in chunk:
                    notify("start", client)
                try:
                    metrics, local = self._train(chunk, state)
                except Exception as exception:
                    names = f"{chunk[0].name}` to `{chunk[-1].name}" if len(chunk) > 1 else chunk[0].name
                    raise ClientError(names, state.round, "local training", exception) from exception
                for client in chunk:
                    notify("end", client)
                yield from self._updates(chunk, state, metrics, local)

    def release(self) -> None:
        """Give the optimizer the module's own parameters again."""
        for group, parameters in zip(self._optimizer.param_groups, self._own_parameters, strict=True):
            group["params"] = parameters
        self._stack = None

    def _groups(self, clients: list[Client]) -> list[list[Client]]:
        """Clients with minibatches of the same shapes, step by step."""
        by_epoch = self._work.steps is None or any(
            c.interval == "epoch" for c in self._federation.optimizers.schedulers
        )
        groups: dict[int, list[Client]] = {}
        for client in clients:
            size = len(client.data)
            groups.setdefault(size if by_epoch else min(size, self._work.batch_size), []).append(client)
        return list(groups.values())

    def _train(self, chunk: list[Client], state: GlobalState) -> tuple[dict[str, Tensor], LocalRound]:
        """Train one chunk from the global state; the stack then holds the clients' weights."""
        full_gradients = self._rounds.full_gradients(chunk, state)
        federation, view, work = self._federation, self._view, self._work
        stack = self._prepare_stack(len(chunk))
        stack.load(state)
        federation.optimizers.reset(state.lr_factor)
        local = self._rounds.start(chunk, state, full_gradients, stacked=True)
        seed_generators(state.seed, state.round, chunk[0].index, Purpose.LOCAL_STEPS, federation.fabric.device)
        sizes = {len(client.data) for client in chunk}
        view.training = True
        view.start_client(work, len(chunk[0].data))
        logged = LogCapture(federation.fabric.device)
        epoch = -1
        with self._capture.attached(self._module):
            for index, (new_epoch, batch) in enumerate(self._batches(chunk, state)):
                if new_epoch != epoch:
                    if epoch >= 0:
                        federation.optimizers.step_schedulers("epoch", epoch + 1)
                    epoch, first = new_epoch, index
                    view.current_epoch = epoch if len(sizes) == 1 else None
                self._step(stack, batch, index - first, logged, local)
                federation.optimizers.step_schedulers("step", index - first + 1)
                view.global_step += 1
        view.stop_client()
        return {name: value for name, (value, _) in logged.values().items()}, local

    def _step(self, stack: ClientStack, batch: Any, batch_idx: int, logged: LogCapture, local: LocalRound) -> None:
        weights: dict[str, float] = {}
        capture = self._capture

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
        if self._work.gradient_clip_val is not None:
            stack.clip_gradients(self._work.gradient_clip_val)
        if self._algorithm.corrects:
            self._algorithm.correct(stack.flat_gradients(), stack.matrix, local)
        self._optimizer.step()
        self._algorithm.project(stack.matrix, local)
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
                if "Batching rule not implemented" not in str(error):
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

    def _batches(self, chunk: list[Client], state: GlobalState) -> Iterator[tuple[int, Any]]:
        """Stacked minibatches, each with the number of the pass that the first client is in."""
        work = self._work
        if all(len(client.data) <= work.batch_size for client in chunk) and not self._federation.transfer.has_hooks:
            for epoch in range(work.batches(len(chunk[0].data))):
                yield epoch, self._whole_clients(chunk)
            return
        streams = [
            minibatches(
                len(client.data),
                work.batch_size,
                generator(state.seed, state.round, client.index, Purpose.MINIBATCHES),
                steps=work.steps,
                epochs=work.epochs,
            )
            for client in chunk
        ]
        for drawn in zip(*streams, strict=True):
            yield drawn[0][0], self._stack_batches(chunk, [positions for _, positions in drawn])

    def _whole_clients(self, chunk: list[Client]) -> Any:
        """All samples of each client, stacked once for as long as the same clients train and no step changes them."""
        key = [client.index for client in chunk]
        if self._whole is None or self._whole[0] != key or self._whole[2] != _versions(self._whole[1]):
            batch = self._stack_batches(chunk, [np.arange(len(client.data)) for client in chunk])
            self._whole = (key, batch, _versions(batch))
        return self._whole[1]

    def _stack_batches(self, chunk: list[Client], positions: list[np.ndarray]) -> Any:
        transfer = self._federation.transfer
        together = stacked_batch([client.data for client in chunk], positions)
        if together is not None and not transfer.has_hooks:
            return transfer(together)
        batches = [transfer(client.data.batch(p)) for client, p in zip(chunk, positions, strict=True)]
        return tree_map(lambda *leaves: torch.stack(leaves), *batches)

    def _prepare_stack(self, size: int) -> ClientStack:
        """A stack for this many clients, with the optimizer working on it."""
        if self._stack is None or self._stack.size != size:
            self._stack = ClientStack(self._federation, size)
        own = self._stack.by_parameter
        for group, parameters in zip(self._optimizer.param_groups, self._own_parameters, strict=True):
            group["params"] = [own[id(parameter)] for parameter in parameters if id(parameter) in own]
        return self._stack

    def _updates(
        self, chunk: list[Client], state: GlobalState, metrics: dict[str, Tensor], local: LocalRound
    ) -> Iterator[ClientUpdate]:
        assert self._stack is not None
        deltas = self._stack.take_deltas(state.weights)
        extra = self._rounds.finish(chunk, deltas, local)
        floats, integers = self._stack.flat_buffers(state.weights.dtype)
        for i, client in enumerate(chunk):
            yield ClientUpdate(
                client,
                deltas[i],
                {name: value[i] for name, value in metrics.items()},
                None if floats is None else floats[i],
                None if integers is None else integers[i],
                extra[i],
            )


def _versions(batch: Any) -> list[int]:
    """How often each tensor has been written to."""
    return [leaf._version for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
