"""Many clients in one step: loss and gradient are vmapped over stacked parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.data.client_data import ReusableBatch, stacked_batch
from lightning_feddua.engines.base import Client, Engine, GlobalState, Notify, positions_of
from lightning_feddua.engines.compiled import CompiledSteps
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.engines.stack import ClientStack
from lightning_feddua.engines.stacked_steps import StackedSteps
from lightning_feddua.errors import ClientError
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.training_step import TRAINING_HOOKS
from lightning_feddua.randomness import Purpose, seed_generators

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
        compile: whether to compile the local steps of a stack into one function.
        one_by_one: trains the clients of a stack whose steps have failed; without it the first client has the error.
    """

    name = "vectorized"

    def __init__(
        self,
        federation: Federation,
        algorithm: LocalTraining,
        states: ClientStates,
        compile: bool = False,
        one_by_one: Engine | None = None,
    ) -> None:
        self._federation = federation
        self._algorithm = algorithm
        self._one_by_one = one_by_one
        self._rounds = LocalRounds(federation, algorithm, states)
        self._module = federation.module
        self._view = federation.view
        self._optimizer = federation.optimizers.optimizers[0]
        self._own_parameters = [list(group["params"]) for group in self._optimizer.param_groups]
        self._steps = StackedSteps(federation, algorithm)
        self._compiled = CompiledSteps(federation, algorithm, self._steps, self._attach) if compile else None
        self._stack: ClientStack | None = None
        # Clients that fit into one minibatch: who, and their samples.
        self._whole: tuple[list[int], ReusableBatch] | None = None
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

    def run(self, clients: list[Client], state: GlobalState, notify: Notify) -> Iterator[ClientUpdate | ClientError]:
        """Train clients in chunks of equal shapes. `notify` hears of all of a chunk before and after its steps.

        In a chunk that fails, nobody knows by whose fault: its clients are trained again one by one, which finds out.
        """
        self._work = state.work
        for group in self._groups(clients):
            for start in range(0, len(group), self._chunk):
                chunk = group[start : start + self._chunk]
                for client in chunk:
                    notify("start", client)
                try:
                    metrics, local = self._train(chunk, state)
                except Exception as exception:
                    self._view.stop_client()
                    if self._one_by_one is None:
                        yield ClientError(chunk[0].name, state.round, "local training", exception)
                        continue
                    warnings.warn(
                        f"Round {state.round}: the vectorized steps of {len(chunk)} clients failed with"
                        f" {type(exception).__name__}: {exception}. These clients are trained one by one.",
                        stacklevel=2,
                    )
                    self.release()
                    yield from self._one_by_one.run(chunk, state, lambda moment, client: None)
                    continue
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
        view.training = True
        view.start_client(work, len(chunk[0].data))
        sizes = {len(client.data) for client in chunk}
        batches = self._batches(chunk, state)
        clip, same_size = work.gradient_clip_val, len(sizes) == 1
        if self._compiled is None:
            metrics = self._steps.run(stack, batches, local, clip, same_size)
        else:
            metrics = self._compiled.run(stack, batches, local, clip, same_size, state.lr_factor)
        view.stop_client()
        return metrics, local

    def _batches(self, chunk: list[Client], state: GlobalState) -> Iterator[tuple[int, Any]]:
        """Stacked minibatches, each with the number of the pass that the first client is in."""
        work = self._work
        if all(len(client.data) <= work.batch_size for client in chunk) and not self._federation.transfer.has_hooks:
            key = [client.index for client in chunk]
            for epoch in range(work.batches(len(chunk[0].data))):
                yield epoch, self._whole_clients(chunk, key)
            return
        streams = [positions_of(client, state) for client in chunk]
        for drawn in zip(*streams, strict=True):
            yield drawn[0][0], self._stack_batches(chunk, [positions for _, positions in drawn])

    def _whole_clients(self, chunk: list[Client], key: list[int]) -> Any:
        """All samples of each client, stacked once for as long as the same clients train and no step changes them."""
        if self._whole is None or self._whole[0] != key or not self._whole[1].untouched:
            batch = self._stack_batches(chunk, [np.arange(len(client.data)) for client in chunk])
            self._whole = (key, ReusableBatch(batch))
        return self._whole[1].batch

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
            vector = self._federation.parameters.vector
            self._stack = ClientStack(self._federation, vector.new_empty(size, len(vector)))
        self._attach(self._stack)
        return self._stack

    def _attach(self, stack: ClientStack) -> None:
        """Let the optimizer work on a stack."""
        own = stack.by_parameter
        for group, parameters in zip(self._optimizer.param_groups, self._own_parameters, strict=True):
            group["params"] = [own[id(parameter)] for parameter in parameters if id(parameter) in own]

    def _updates(
        self, chunk: list[Client], state: GlobalState, metrics: dict[str, Tensor], local: LocalRound
    ) -> Iterator[ClientUpdate]:
        assert self._stack is not None
        deltas = self._stack.take_deltas(state.weights)
        extra, kept = self._rounds.finish(deltas, local)
        floats, integers = self._stack.flat_buffers(state.weights.dtype)
        for i, client in enumerate(chunk):
            yield ClientUpdate(
                client,
                deltas[i],
                {name: value[i] for name, value in metrics.items()},
                None if floats is None else floats[i],
                None if integers is None else integers[i],
                {name: vectors[i] for name, vectors in extra.items()},
                None if kept is None else kept[i],
            )
