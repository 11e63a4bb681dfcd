"""Which engine runs a module's clients: what is asked for, or what is faster by what a few real steps show to count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.collectives import on_rank_zero
from lightning_feddua.agreement import UPDATE_TOLERANCE, relative_difference, short_reason
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.data.streams import ClientStream
from lightning_feddua.engines.base import (
    AUTO,
    Client,
    ClientEvents,
    Engine,
    GlobalState,
    LocalWork,
    find_engine,
    is_registered,
)
from lightning_feddua.engines.prediction import predicted_speedup
from lightning_feddua.engines.rehearsal import undone
from lightning_feddua.engines.sequential import SequentialEngine
from lightning_feddua.engines.stack_parts import StackPlan
from lightning_feddua.engines.step_cost import CostCounter, StepCost
from lightning_feddua.engines.vectorized import READ_IN_TURN, VectorizedEngine
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import Purpose, drawn_from

# Steps of a trial, and clients that the sequential engine tries them on.
_TRIAL_STEPS = 2
_TRIAL_CLIENTS = 2
# Vectorized clients round differently and take more memory, so they must be worth it.
_LEAST_SPEEDUP = 1.05


def choose_engine(
    engine: str | type[Engine],
    federation: Federation,
    algorithm: LocalTraining,
    first_round: Callable[[], tuple[list[Client], GlobalState]],
) -> tuple[type[Engine], str]:
    """A run's engine, and what the header says of it. Every rank gets the same; a collective.

    The vectorized engine is compared with the sequential one in a trial, also where it is asked for. Any other engine
    is used as it is, unless it says itself that it cannot run the module.

    Args:
        engine: what is asked for: ``"auto"``, or anything that :func:`find_engine` takes.
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        first_round: gives this rank's part of the first cohort and the global state that it starts from; called only
            if there is a trial.
    """
    asked = None if engine == AUTO else find_engine(engine)
    if asked is SequentialEngine:
        return asked, asked.name
    with_trial = asked is None or asked is VectorizedEngine
    clients, state = first_round() if with_trial else ([], None)
    if state is not None:
        name, note = on_rank_zero(federation.fabric, _decide, asked is None, federation, algorithm, clients, state)
    else:
        name, note = on_rank_zero(federation.fabric, _check, asked, federation, algorithm)
    return find_engine(name) if asked is None else asked, note


def known_engine(engine: str | type[Engine], known: str) -> tuple[type[Engine], str]:
    """The engine that a run has used so far, without a trial, and what the header says of it.

    Args:
        engine: what is asked for.
        known: the name of the engine so far.
    """
    if engine == AUTO and not is_registered(known):
        raise ConfigurationError(
            f"The checkpoint's run used the engine `{known}`, which is not registered.",
            "Give its class or import path as `engine`.",
        )
    found = find_engine(known if engine == AUTO else engine)
    if found.name != known:
        raise ConfigurationError(
            f"The checkpoint's run used the {known} engine, and `engine={found.name}` would round differently.",
            'Use the same or `engine="auto"`, or start a new run.',
        )
    return found, f"{known}, as before"


def _check(engine: type[Engine], federation: Federation, algorithm: LocalTraining) -> tuple[str, str]:
    obstacle = engine.obstacle(federation, algorithm)
    if obstacle is not None:
        raise ConfigurationError(
            f"The engine `{engine.name}` cannot run `{type(federation.module).__name__}`: {obstacle}.",
            'Use `engine="auto"` or "sequential".',
        )
    return engine.name, engine.name


def _decide(
    auto: bool, federation: Federation, algorithm: LocalTraining, clients: list[Client], state: GlobalState
) -> tuple[str, str]:
    """Whether clients are vectorized, and what to say of it; an error where that was asked for and is not possible."""
    if auto and len(clients) < 2:
        return "sequential", "sequential (too few clients per rank to vectorize)"
    obstacle = VectorizedEngine.obstacle(federation, algorithm)
    if obstacle is None and any(isinstance(client.data, ClientStream) for client in clients):
        obstacle = READ_IN_TURN
    stacks, speedup = "", 0.0
    if obstacle is None and clients:
        obstacle, stacks, speedup = _try(federation, algorithm, clients, state, auto)
    if not auto:
        if obstacle is not None:
            raise ConfigurationError(
                f"The clients cannot be vectorized: {obstacle}.", 'Use `engine="auto"` or "sequential".'
            )
        return "vectorized", "vectorized"
    if obstacle is not None:
        return "sequential", f"sequential (not vectorized: {obstacle})"
    engine, be = ("sequential", "would be") if speedup < _LEAST_SPEEDUP else ("vectorized", "are")
    fast = f"{stacks} {be} about {speedup:.1f} times as fast as one by one, by counting what there is to do"
    return engine, f'{engine} ({fast}; engine="{engine}" fixes the choice)'


def _try(
    federation: Federation, algorithm: LocalTraining, clients: list[Client], state: GlobalState, auto: bool
) -> tuple[str | None, str, float]:
    """An obstacle that shows in a trial; the stacks in words; how many times faster they should be than one by one."""
    size, dtype = state.weights.numel(), state.weights.dtype
    states = ClientStates(federation.fabric, algorithm.client_state, size, dtype)
    sequential = SequentialEngine(federation, algorithm, states)
    vectorized = VectorizedEngine(federation, algorithm, states)
    vectorized.retrains = False
    # What they try must be what will run: clients of two sizes, if there are any, are what a stack has to cope with.
    tried = _of_two_sizes(clients)
    short = replace(state, work=_shortened(state.work, max(len(client.data) for client in clients)))
    vectorized.fewest_together = 1
    try:
        with undone(federation, state):
            obstacle, cost = _compare(federation, sequential, vectorized, tried, short, auto)
    finally:
        sequential.close()
    threads, device = torch.get_num_threads(), federation.fabric.device.type
    vectorized.fewest_together = type(vectorized).fewest_together
    stacks = vectorized.stacks(clients, state.work)
    speedup = 0.0 if cost is None else predicted_speedup(cost, stacks, device, threads)
    largest = max(len(plan.sizes) for plan in stacks)
    return obstacle, f"stacks of {'' if len(stacks) == 1 else 'up to '}{largest}", speedup


def _shortened(work: LocalWork, largest: int) -> LocalWork:
    """Work of the same kind, of a few steps."""
    if work.epochs is None:
        return replace(work, steps=min(_TRIAL_STEPS, work.batches(largest)))
    length = work.pass_length(largest)
    epochs = min(work.epochs, -(-_TRIAL_STEPS // length))
    return replace(work, epochs=epochs, limit=work.limit if length <= _TRIAL_STEPS else _TRIAL_STEPS)


def _of_two_sizes(clients: list[Client]) -> list[Client]:
    """The same clients, one of another size than the largest first, if there is one, and the largest second."""
    largest = max(clients, key=lambda client: len(client.data))
    other = next((client for client in clients if len(client.data) != len(largest.data)), None)
    first = [client for client in (other, largest) if client is not None]
    return [*first, *(client for client in clients if client not in first)]


def _compare(
    federation: Federation,
    sequential: SequentialEngine,
    vectorized: VectorizedEngine,
    clients: list[Client],
    state: GlobalState,
    auto: bool,
) -> tuple[str | None, StepCost | None]:
    """An obstacle, if there is one, and the cost of one client's step."""
    few, expected, random, problem = [], [], False, ""
    cost = StepCost()
    for client in clients:
        try:
            with CostCounter() as counter:
                expected += _deltas(sequential, [client], state)
            # The last one's: some models do more in their very first step.
            cost = counter.cost.per_step(state.work.minibatch_sizes(len(client.data)))
            few.append(client)
            if changed := federation.hidden_state.changes():
                return f"its training step changes `{changed[0]}`", None
            drawn = drawn_from(state.seed, state.round, client.index, Purpose.LOCAL_STEPS, federation.fabric.device)
            random = random or bool(drawn)
        except ClientError as error:
            # The run itself meets those that fail, and says so with the right round.
            problem = error.problem.rstrip(".")
        if len(few) == _TRIAL_CLIENTS:
            break
    if not few:
        return f"its training step failed in a trial with {problem}", None
    if random and auto:
        return "it draws random numbers in its steps, and would draw others", None
    if cost.fused is not None and auto:
        return "its recurrent layers run as one kernel only one by one", None
    try:
        with CostCounter() as counter:
            found = _deltas(vectorized, few, state)
        cost.stacked = _of_vmapped_step(counter.cost, vectorized.stacks(few, state.work))
        tolerance = UPDATE_TOLERANCE[federation.parameters.vector.dtype]
        if not random and not (difference := relative_difference(expected, found)) <= tolerance:
            return f"its updates differ from the sequential ones by {difference:.1e}", None
    except ClientError as error:
        return short_reason(error.__cause__ or error), None
    finally:
        vectorized.release()
    return None, cost


def _of_vmapped_step(cost: StepCost, stacks: Sequence[StackPlan]) -> StepCost:
    """The kernels of one vmapped step, and the bytes of one client in it."""
    parts = [part for plan in stacks for _, parts in plan.steps() for part in parts]
    return StepCost(cost.kernels / len(parts), bytes=cost.bytes / sum(len(part.places) for part in parts))


def _deltas(engine: Engine, clients: list[Client], state: GlobalState) -> list[Tensor]:
    deltas = {}
    for result in engine.run(clients, state, ClientEvents()):
        if isinstance(result, ClientError):
            raise result
        deltas[result.client.position] = result.delta.clone()
    return [deltas[client.position] for client in clients]
