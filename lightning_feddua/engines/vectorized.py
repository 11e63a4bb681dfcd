"""Many clients in one step: loss and gradient are vmapped over stacked parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_feddua._private import tree_map
from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.data.client_data import ReusableBatch, stacked_batch
from lightning_feddua.data.prefetch import BatchRequest, read_batch
from lightning_feddua.engines.base import Client, ClientEvents, Engine, GlobalState, LocalWork, register_engine
from lightning_feddua.engines.compiled import CompiledSteps
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.engines.minibatches import requests_of
from lightning_feddua.engines.sequential import SequentialEngine
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stacked_steps import StackedSteps
from lightning_feddua.engines.time_limit import time_limit
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.hidden.snapshot import Snapshot
from lightning_feddua.host.training_step import TRAINING_HOOKS
from lightning_feddua.lightning_names import is_overridden
from lightning_feddua.randomness import TORCH, Purpose, drawn_from, seed_generators

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
# Why the batches of some clients cannot be stacked.
READ_IN_TURN = "its clients are DataLoaders or streams, which are read one after another"


@register_engine
class VectorizedEngine(Engine):
    """Trains clients together, those whose minibatches have the same shapes in one stack.

    The module's own optimizer runs on the stack of parameters as it would on one client's. Minibatches are those of the
    sequential engine; what is random inside a step (dropout) is drawn for the whole stack at once.

    Args:
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        states: what they keep between rounds.
        compile: whether to compile the local steps of a stack into one function.
    """

    name = "vectorized"
    in_lanes = False
    # Whether the clients of a stack that fails are trained again one by one; if not, the first of them gets the error.
    retrains = True
    # Whether steps may draw random numbers, which for a stack are others than one by one.
    may_draw = True

    def __init__(
        self, federation: Federation, algorithm: LocalTraining, states: ClientStates, compile: bool = False
    ) -> None:
        super().__init__(federation, algorithm, states, compile)
        self._one_by_one: SequentialEngine | None = None
        self._rounds = LocalRounds(federation, algorithm, states)
        self._view = federation.view
        self._optimizer = federation.optimizers.optimizers[0]
        self._own_parameters = [list(group["params"]) for group in self._optimizer.param_groups]
        self._steps = StackedSteps(federation, algorithm, self._rounds)
        self._compiled = CompiledSteps(federation, algorithm, self._steps, self._attach) if compile else None
        self._stack: ClientStack | None = None
        # Clients that fit into one minibatch: who, and their samples.
        self._whole: tuple[list[int], ReusableBatch] | None = None
        parameter_bytes = len(federation.parameters) * federation.parameters.vector.element_size()
        # Weights, gradients and the optimizer's state, and what the algorithm adds.
        copies = 4 + 2 * algorithm.corrects + len(algorithm.client_state) + len(algorithm.extra_vectors)
        self._chunk = max(1, MEMORY_BOUND // (copies * parameter_bytes))

    @classmethod
    def obstacle(cls, federation: Federation, algorithm: LocalTraining) -> str | None:
        """Why a module cannot be vectorized, as far as can be told without running it; None if nothing is known."""
        module = federation.module
        if not module.automatic_optimization:
            return "it optimizes manually"
        if federation.datamodule.has_streams:
            return READ_IN_TURN
        optimizer = federation.optimizers.optimizers[0]
        if type(optimizer) not in ELEMENTWISE:
            return f"its optimizer `{type(optimizer).__name__}` is not known to work element by element"
        if own := [name for name in TRAINING_HOOKS if is_overridden(name, module)]:
            return f"it overrides `{own[0]}`"
        if (hook := federation.callbacks.training_hook()) is not None:
            return hook
        if not algorithm.supports_vectorized:
            return f"`{type(algorithm).__name__}` does not work on a stack of clients"
        if getattr(federation.fabric.strategy.precision, "scaler", None) is not None:
            return "gradients are scaled in 16-mixed precision"
        if federation.work.accumulate > 1:
            return f"gradients are accumulated (`accumulate_grad_batches={federation.work.accumulate}`)"
        if federation.buffers.parameter_names:
            return f"its training step moves `{federation.buffers.parameter_names[0]}` without an optimizer"
        return federation.schedules.obstacle()

    def stacks(self, clients: list[Client], work: LocalWork) -> list[tuple[int, int]]:
        """The number of clients and of steps of each stack that they would train in."""
        self._work = work
        chunks = [
            group[start : start + self._chunk]
            for group in self._groups(clients)
            for start in range(0, len(group), self._chunk)
        ]
        return [(len(chunk), work.batches(len(chunk[0].data))) for chunk in chunks]

    def run(
        self, clients: list[Client], state: GlobalState, events: ClientEvents
    ) -> Iterator[ClientUpdate | ClientError]:
        """Train clients in chunks of equal shapes. All clients of a chunk start before its steps and end after them.

        If a chunk fails, it is not known which client is the cause. Its clients are then trained one by one.
        """
        self._work = state.work
        for group in self._groups(clients):
            for start in range(0, len(group), self._chunk):
                chunk = group[start : start + self._chunk]
                self.federation.hidden_state.restore()
                if events.start is not None:
                    self.federation.restore(state.weights)
                    for client in chunk:
                        events.start(client)
                try:
                    with time_limit(state.work.timeout, chunk[0].name, len(chunk)):
                        stack, metrics, local = self._train(chunk, state)
                except ConfigurationError:
                    # A mistake in the setup and not of these clients: all others would fail too.
                    raise
                except Exception as exception:
                    self._view.stop_client()
                    yield from self._retrain(chunk, state, events, exception)
                    continue
                if events.end is not None:
                    for place, client in enumerate(chunk):
                        stack.show(place)
                        events.end(client)
                yield from self._updates(chunk, state, stack, metrics, local)

    def _retrain(
        self, chunk: list[Client], state: GlobalState, events: ClientEvents, exception: Exception
    ) -> Iterator[ClientUpdate | ClientError]:
        """Train the clients of a chunk that has failed, which have started already, one by one."""
        if not self.retrains:
            yield ClientError(chunk[0].name, state.round, "local training", exception)
            return
        warnings.warn(
            f"Round {state.round}: the vectorized steps of {len(chunk)} client{'s' * (len(chunk) > 1)} failed with"
            f" {type(exception).__name__}: {exception}. These clients are trained one by one.",
            stacklevel=2,
        )
        self.release()
        if self._one_by_one is None:
            self._one_by_one = SequentialEngine(self.federation, self.algorithm, self.states)
        yield from self._one_by_one.run(chunk, state, ClientEvents(end=events.end))

    def release(self) -> None:
        """Give the optimizer the module's own parameters again."""
        for group, parameters in zip(self._optimizer.param_groups, self._own_parameters, strict=True):
            group["params"] = parameters
        self._stack = None

    def _groups(self, clients: list[Client]) -> list[list[Client]]:
        """Clients with minibatches of the same shapes, step by step, whose schedulers step at the same time."""
        # Schedulers count epochs, or steps from the start of each epoch.
        schedulers = self.federation.optimizers.schedulers
        by_size = self._work.steps is None or any(c.interval == "epoch" or c.frequency > 1 for c in schedulers)
        groups: dict[int, list[Client]] = {}
        for client in clients:
            size = len(client.data)
            groups.setdefault(size if by_size else min(size, self._work.batch_size), []).append(client)
        return list(groups.values())

    def _train(self, chunk: list[Client], state: GlobalState) -> tuple[ClientStack, dict[str, Tensor], LocalRound]:
        """Train one chunk from the global state: its stack, with the clients' weights, and what they logged."""
        full_gradients = self._rounds.full_gradients(chunk, state)
        federation, view, work = self.federation, self._view, self._work
        stack = self._prepare_stack(len(chunk))
        stack.load(state)
        federation.optimizers.reset(state.lr_factor)
        local = self._rounds.start(chunk, state, full_gradients, stacked=True)
        seed = (state.seed, state.round, chunk[0].index, Purpose.LOCAL_STEPS, federation.fabric.device)
        seed_generators(*seed)
        before = federation.hidden_state.present()
        size = len(chunk[0].data)
        same_size = all(len(client.data) == size for client in chunk)
        view.in_client = True
        view.start_client(work, size if same_size else _refuse_size)
        batches, clip = self._batches(chunk, state), work.clip
        if self._compiled is None:
            metrics = self._steps.run(stack, batches, local, clip, same_size)
        else:
            metrics = self._compiled.run(stack, batches, local, clip, same_size, state.lr_factor)
        view.log_options |= self._steps.log_options
        view.stop_client()
        self._check(before, seed)
        return stack, metrics, local

    def _check(self, before: Snapshot, seed: tuple[int, int, int, Purpose, torch.device]) -> None:
        """Raise what keeps the steps of a stack from being those of each client, and did not show in a trial."""
        if not before.same() and (changed := before.changes()):
            raise TypeError(f"its training step changes `{changed[0]}`, which the clients of a stack share")
        if drawn := drawn_from(*seed):
            if not self.may_draw:
                raise TypeError(f"it draws random numbers from {drawn[0]} in its steps, and would draw others")
            if (shared := drawn[-1]) != TORCH:
                raise TypeError(f"it draws random numbers from {shared}, which the clients of a stack would share")

    def _batches(self, chunk: list[Client], state: GlobalState) -> Iterator[tuple[int, Any]]:
        """Stacked minibatches, each with the number of the pass that the first client is in."""
        work = self._work
        same = all(client.data.in_memory and len(client.data) <= work.batch_size for client in chunk)
        if same and not self.federation.transfer.has_hooks:
            for epoch in range(work.batches(len(chunk[0].data))):
                yield epoch, self._whole_clients(chunk, state)
            return
        for requests in zip(*(requests_of(client, state) for client in chunk), strict=True):
            yield requests[0].epoch, self._stack_batches(chunk, requests)

    def _whole_clients(self, chunk: list[Client], state: GlobalState) -> Any:
        """All samples of each client, stacked once for as long as the same clients train and no step changes them."""
        key = [client.index for client in chunk]
        if self._whole is None or self._whole[0] != key or not self._whole[1].untouched:
            requests = [next(requests_of(client, state)) for client in chunk]
            self._whole = (key, ReusableBatch(self._stack_batches(chunk, requests)))
        return self._whole[1].batch

    def _stack_batches(self, chunk: list[Client], requests: Sequence[BatchRequest]) -> Any:
        transfer = self.federation.transfer
        together = stacked_batch([client.data for client in chunk], [request.positions for request in requests])
        if together is not None and not transfer.has_hooks:
            return transfer(together)
        batches = [transfer(read_batch(client.data, r)) for client, r in zip(chunk, requests, strict=True)]
        return tree_map(_stack, *batches)

    def _prepare_stack(self, size: int) -> ClientStack:
        """A stack for this many clients, with the optimizer working on it."""
        if self._stack is None or self._stack.size != size:
            vector = self.federation.parameters.vector
            self._stack = ClientStack(self.federation, vector.new_empty(size, len(vector)))
        self._attach(self._stack)
        return self._stack

    def _attach(self, stack: ClientStack) -> None:
        """Let the optimizer work on a stack."""
        own = stack.by_parameter
        for group, parameters in zip(self._optimizer.param_groups, self._own_parameters, strict=True):
            group["params"] = [own[id(parameter)] for parameter in parameters if id(parameter) in own]

    def _updates(
        self,
        chunk: list[Client],
        state: GlobalState,
        stack: ClientStack,
        metrics: dict[str, Tensor],
        local: LocalRound,
    ) -> Iterator[ClientUpdate]:
        deltas = stack.take_deltas(state.weights)
        extra, kept, scalars = self._rounds.finish(deltas, local)
        floats, integers = stack.flat_buffers(state.weights.dtype)
        for i, client in enumerate(chunk):
            yield ClientUpdate(
                client,
                deltas[i],
                {name: value[i] for name, value in metrics.items()},
                None if floats is None else floats[i],
                None if integers is None else integers[i],
                {name: vectors[i] for name, vectors in extra.items()},
                None if kept is None else kept[i],
                {name: values[i] for name, values in scalars.items()},
            )


def _stack(*leaves: Any) -> Tensor:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"its batches have a `{type(leaf).__name__}` in them, which cannot be stacked over clients")
    return torch.stack(leaves)


def _refuse_size() -> int:
    raise TypeError("its training step asks for the length of an epoch, which differs between clients")
