"""Many clients in one step: loss and gradient are vmapped over stacked parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.engines.base import Client, ClientEvents, Engine, GlobalState, LocalWork, register_engine
from lightning_feddua.engines.compiled import CompiledSteps
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.engines.sequential import SequentialEngine
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stack_parts import FEWEST_TOGETHER, StackPlan
from lightning_feddua.engines.stacked_minibatches import StackedMinibatches
from lightning_feddua.engines.stacked_steps import Ended, StackedSteps
from lightning_feddua.engines.time_limit import time_limit
from lightning_feddua.errors import ClientError, ConfigurationError, UnequalClientsError
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
    """Trains clients together in stacks.

    A step of a stack is a vmapped step of the clients whose minibatches have the same shape, and single steps of the
    few others, such as those at the end of a pass. A stack shrinks as clients end. The module's own optimizer runs on
    the stack of parameters as it would on one client's. Minibatches are those of the sequential engine; what is random
    inside a step (dropout) is drawn for the whole stack at once.

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
    # Below so many clients of a stack of unequal ones, steps are made one by one.
    fewest_together = FEWEST_TOGETHER
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
        self._steps = StackedSteps(federation, algorithm, self._rounds, self._attach)
        self._compiled = CompiledSteps(federation, algorithm, self._steps, self._attach) if compile else None
        self._stack: ClientStack | None = None
        # Whether clients whose minibatches have other shapes may train in one stack.
        self._mixes = True
        self._batches = StackedMinibatches(federation)
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

    def expect(self, clients: list[Client], work: LocalWork) -> None:
        """Make ready for rounds like the first, whose clients these are."""
        if self._compiled is not None:
            self._compiled.expect(self.stacks(clients, work))

    def stacks(self, clients: list[Client], work: LocalWork) -> list[StackPlan]:
        """What the clients would do in each stack that they would train in."""
        self._work = work
        return [self._plan(chunk) for chunk in self._chunks(clients)]

    def run(
        self, clients: list[Client], state: GlobalState, events: ClientEvents
    ) -> Iterator[ClientUpdate | ClientError]:
        """Train clients in stacks. All clients of a stack start before its steps and end after them.

        If a stack fails, it is not known which client is the cause. Its clients are then trained one by one.
        """
        self._work = state.work
        chunks = self._chunks(clients)
        started: set[int] = set()
        while chunks:
            chunk = chunks.pop(0)
            self.federation.hidden_state.restore()
            if events.start is not None:
                self.federation.restore(state.weights)
                for client in chunk:
                    if client.position not in started:
                        events.start(client)
                started.update(client.position for client in chunk)
            try:
                with time_limit(state.work.timeout, chunk[0].name, len(chunk)):
                    stack, ended = self._train(chunk, state)
            except ConfigurationError:
                # A mistake in the setup and not of these clients: all others would fail too.
                raise
            except Exception as exception:
                self._view.stop_client()
                if self._mixes and isinstance(exception, UnequalClientsError):
                    # From now on clients of each size have stacks of their own.
                    self._mixes = False
                    chunks = self._chunks([client for each in (chunk, *chunks) for client in each])
                    continue
                yield from self._retrain(chunk, state, events, exception)
                continue
            if events.end is not None:
                for place, client in enumerate(chunk):
                    stack.show(place)
                    events.end(client)
            yield from self._updates(chunk, state, stack, ended)

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

    def _chunks(self, clients: list[Client]) -> list[list[Client]]:
        """The clients of each stack, those with the most and the largest minibatches first."""
        work = self._work
        groups: dict[Any, list[Client]] = {}
        for client in clients:
            groups.setdefault(self._shape(client), []).append(client)
        if self._mixes and not self._by_size:
            order = sorted(clients, key=lambda c: (-work.batches(len(c.data)), -min(len(c.data), work.batch_size)))
            groups = {None: order}
        chunks = []
        for group in groups.values():
            chunks += [group[start : start + self._chunk] for start in range(0, len(group), self._chunk)]
        return chunks

    @property
    def _by_size(self) -> bool:
        """Whether the clients of a stack must have the same size, because schedulers count epochs, or steps in them."""
        return any(c.interval == "epoch" or c.frequency > 1 for c in self.federation.optimizers.schedulers)

    def _shape(self, client: Client) -> int:
        """The same for clients with minibatches of the same shapes, step by step."""
        size = len(client.data)
        return size if self._work.steps is None or self._by_size else min(size, self._work.batch_size)

    def _plan(self, chunk: list[Client]) -> StackPlan:
        """How the clients of a stack step together."""
        alike = len({self._shape(client) for client in chunk}) == 1
        return StackPlan(tuple(len(client.data) for client in chunk), self._work, 1 if alike else self.fewest_together)

    def _train(self, chunk: list[Client], state: GlobalState) -> tuple[ClientStack, list[Ended]]:
        """Train one chunk from the global state: its stack, with the clients' weights, and how they ended."""
        full_gradients = self._rounds.full_gradients(chunk, state)
        federation, view, work = self.federation, self._view, self._work
        stack = self._prepare_stack(len(chunk))
        stack.load(state)
        self._attach(stack)
        federation.optimizers.reset(state.lr_factor)
        local = self._rounds.start(chunk, state, full_gradients, stacked=True)
        seed = (state.seed, state.round, chunk[0].index, Purpose.LOCAL_STEPS, federation.fabric.device)
        seed_generators(*seed)
        before = federation.hidden_state.present()
        size = len(chunk[0].data)
        same_size = all(len(client.data) == size for client in chunk)
        view.in_client = True
        view.start_client(work, size if same_size else _refuse_size)
        batches, clip = self._batches.of_stack(chunk, state, self._plan(chunk).fewest), work.clip
        if self._compiled is None:
            ended = self._steps.run(stack, batches, local, clip, same_size)
        else:
            ended = self._compiled.run(stack, batches, local, clip, same_size, state.lr_factor)
        view.log_options |= self._steps.log_options
        view.stop_client()
        self._check(before, seed)
        return stack, ended

    def _check(self, before: Snapshot, seed: tuple[int, int, int, Purpose, torch.device]) -> None:
        """Raise what keeps the steps of a stack from being those of each client, and did not show in a trial."""
        if not before.same() and (changed := before.changes()):
            raise TypeError(f"its training step changes `{changed[0]}`, which the clients of a stack share")
        if drawn := drawn_from(*seed):
            if not self.may_draw:
                raise TypeError(f"it draws random numbers from {drawn[0]} in its steps, and would draw others")
            if (shared := drawn[-1]) != TORCH:
                raise TypeError(f"it draws random numbers from {shared}, which the clients of a stack would share")

    def _prepare_stack(self, size: int) -> ClientStack:
        """A stack for this many clients."""
        if self._stack is None or self._stack.size != size:
            vector = self.federation.parameters.vector
            self._stack = ClientStack(self.federation, vector.new_empty(size, len(vector)))
        return self._stack

    def _attach(self, stack: ClientStack) -> None:
        """Let the optimizer work on a stack."""
        own = stack.by_parameter
        for group, parameters in zip(self._optimizer.param_groups, self._own_parameters, strict=True):
            group["params"] = [own[id(parameter)] for parameter in parameters if id(parameter) in own]

    def _updates(
        self, chunk: list[Client], state: GlobalState, stack: ClientStack, ended: list[Ended]
    ) -> Iterator[ClientUpdate]:
        deltas = stack.take_deltas(state.weights)
        floats, integers = stack.flat_buffers(state.weights.dtype)
        for rows, local, metrics in ended:
            extra, kept, scalars = self._rounds.finish(deltas[rows], local)
            for i, place in enumerate(range(rows.start, rows.stop)):
                yield ClientUpdate(
                    chunk[place],
                    deltas[place],
                    {name: value[i] for name, value in metrics.items()},
                    None if floats is None else floats[place],
                    None if integers is None else integers[place],
                    {name: vectors[i] for name, vectors in extra.items()},
                    None if kept is None else kept[i],
                    {name: values[i] for name, values in scalars.items()},
                )


def _refuse_size() -> int:
    raise UnequalClientsError("its training step asks for the length of an epoch, which differs between clients")
