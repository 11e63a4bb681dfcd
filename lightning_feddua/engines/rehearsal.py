"""Local steps that are made to find something out, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.data.loader_parts import unread
from lightning_feddua.data.streams import ClientStream
from lightning_feddua.engines.base import Client, ClientEvents, GlobalState, LocalWork
from lightning_feddua.engines.sequential import SequentialEngine
from lightning_feddua.errors import ClientError
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import preserved_random_state

# Steps after which it is mostly known which parameters move without an optimizer. A teacher that is averaged before
# the step that it follows needs two, also where clients make only one.
_FEWEST, _FEW = 3, 16
# The longest round of a client that is rehearsed as a whole where these have not shown everything.
_MOST = 1000


class Rehearsal(NamedTuple):
    """What a client's local steps have shown.

    Args:
        moving: which parameters they change although no optimizer trains them, as those of a momentum teacher.
        logged: under which names they log something; None where that is not known for the whole of a round.
    """

    moving: list[str]
    logged: list[str] | None


@contextmanager
def undone(federation: Federation, state: GlobalState) -> Iterator[None]:
    """Leave the module, optimizers, loggers and random numbers as if no client had been trained."""
    strategy = federation.view.strategy
    step = strategy.optimizer_step
    others = federation.other_parameters.values()
    random_state = preserved_random_state(federation.fabric.device)
    with federation.world_of_one.entered(), random_state, federation.view.without_loggers():
        try:
            yield
        finally:
            federation.hidden_state.restore(deep=True)
            federation.restore(state.weights)
            federation.other_parameters.restore(others)
            federation.drop_gradients()
            federation.optimizers.reset(state.lr_factor)
            federation.view.stop_client()
            strategy.optimizer_step = step


def rehearse(
    federation: Federation,
    algorithm: LocalTraining,
    clients: Iterable[Client],
    state: GlobalState,
    awaited: Iterable[str] = (),
) -> Rehearsal:
    """Train the first client that does not fail, for a few steps.

    Its whole round is rehearsed, if that is not too long, where something may still come: a copy of trained parameters
    that has not moved, which may be a target network, or the log of a metric.

    Args:
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        clients: those that are tried, in order. What fails here fails again in the round itself, which says so.
        state: the global state that they start from.
        awaited: metrics that clients should log.
    """
    others, view = federation.other_parameters, federation.view
    size, dtype = state.weights.numel(), state.weights.dtype
    states = ClientStates(federation.fabric, algorithm.client_state, size, dtype)
    engine = SequentialEngine(federation, algorithm, states)

    def moved_by(client: Client, work: LocalWork) -> list[str] | None:
        """What one client moves; None if it fails."""
        stream = client.data.loader if isinstance(client.data, ClientStream) else None
        with undone(federation, state), unread(stream):
            values = others.values()
            failed = [isinstance(r, ClientError) for r in engine.run([client], replace(state, work=work), _NOTHING)]
            moved = others.restore(values)
        return None if any(failed) else moved

    def is_logged() -> bool:
        return view.logged_names().issuperset(awaited)

    copies = set(others.copies(federation.parameters.tensors))
    try:
        for client in clients:
            work = state.work
            whole = work.optimizer_steps(len(client.data))
            few = replace(work, steps=max(_FEWEST, min(_FEW, whole)), epochs=None)
            moving = moved_by(client, few)
            if moving is None and whole < _FEWEST:
                # A schedule may end with the client's own last step.
                moving = moved_by(client, work)
            elif moving is not None and _FEW < whole <= _MOST and not (is_logged() and copies <= set(moving)):
                further = moved_by(client, work)
                moving = None if further is None else [n for n in others.named if n in moving or n in further]
            if moving is not None:
                return Rehearsal(moving, sorted(view.logged_names()) if whole <= _MOST or is_logged() else None)
    finally:
        engine.close()
    return Rehearsal([], None)


_NOTHING = ClientEvents()
