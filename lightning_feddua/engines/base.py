"""What the loop and its engines say to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.data.client_data import ClientData, minibatches
from lightning_feddua.errors import ClientError
from lightning_feddua.randomness import Purpose, generator


@dataclass(frozen=True)
class LocalWork:
    """How much a client does in a round.

    Args:
        steps: the number of local steps; or None, and
        epochs: the number of passes over the client's data.
        batch_size: the size of a minibatch.
        gradient_clip_val: the largest global norm of a gradient; None for no clipping.
    """

    steps: int | None
    epochs: int | None
    batch_size: int
    gradient_clip_val: float | None = None

    def batches(self, size: int) -> int:
        """The number of local steps of a client with this many samples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-size // self.batch_size)


@dataclass(frozen=True)
class GlobalState:
    """What every client of a round starts from, besides the buffers that the federation keeps.

    Args:
        round: the round, from 0.
        seed: the run's seed.
        weights: the global weights, flat.
        work: how much each client does.
        lr_factor: multiplies the module's learning rates.
    """

    round: int
    seed: int
    weights: Tensor
    work: LocalWork
    lr_factor: float = 1.0


@dataclass(frozen=True)
class Client:
    """A member of a round's cohort.

    Args:
        position: its place in the cohort.
        index: its place in the data module.
        name: its name.
        data: its samples.
        weight: its weight in the mean.
        lane: where in the order of summation its update comes.
    """

    position: int
    index: int
    name: str
    data: ClientData
    weight: float = 1.0
    lane: int = 0


def positions_of(client: Client, state: GlobalState) -> Iterator[tuple[int, np.ndarray]]:
    """The samples of a client's minibatches, each with the number of the pass over the data that it belongs to."""
    rng = generator(state.seed, state.round, client.index, Purpose.MINIBATCHES)
    work = state.work
    return minibatches(len(client.data), work.batch_size, rng, steps=work.steps, epochs=work.epochs)


@dataclass(frozen=True)
class ClientEvents:
    """Whom to tell of each client. At ``start`` the module holds global weights, at ``end`` the client's own.

    Args:
        start: called before a client's local steps; None where nobody listens.
        end: called after them; None where nobody listens.
    """

    start: Callable[[Client], None] | None = None
    end: Callable[[Client], None] | None = None


# Called with "start" before and "end" after a client's local steps.
Notify = Callable[[str, Client], None]


class Engine(Protocol):
    """Runs the local steps of a rank's clients."""

    name: str

    def run(self, clients: list[Client], state: GlobalState, notify: Notify) -> Iterator[ClientUpdate | ClientError]:
        """Train clients from the same global state, and give their updates one by one; an error for one that fails."""
        ...
