"""Which engine runs a module's clients: what is asked for, or what is faster by what a few real steps show to count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

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
from lightning_feddua.engines.compile_choice import reason_not_to_compile
from lightning_feddua.engines.compiled_engine import CompiledEngine
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


class _Trial(NamedTuple):
    """What a trial of stacks has shown.

    Args:
        obstacle: why clients cannot train in stacks, if so.
        stacks: the stacks of the first round.
        cost: of one client's step; None where it does not matter.
        draws: whether steps draw random numbers.
    """

    obstacle: str | None
    stacks: Sequence[StackPlan] = ()
    cost: StepCost | None = None
    draws: bool = False


def choose_engine(
    engine: str | type[Engine],
    compile: bool | Literal["auto"],
    rounds: int,
    federation: Federation,
    algorithm: LocalTraining,
    first_round: Callable[[], tuple[list[Client], GlobalState]],
) -> tuple[type[Engine], str]:
    """A run's engine, and what the header says of it. Every rank gets the same; a collective.

    The vectorized engine is compared with the sequential one in a trial, also where it is asked for. Any other engine
    is used as it is, unless it says itself that it cannot run the module.

    Args:
        engine: what is asked for: ``"auto"``, or anything that :func:`find_engine` takes.
        compile: whether stacks are compiled; ``"auto"`` for where it pays.
        rounds: the number of rounds.
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        first_round: gives this rank's part of the first cohort and the global state that it starts from; called only
            if there is a trial.
    """
    asked = None if engine == AUTO else find_engine(engine)
    if asked is SequentialEngine:
        return asked, asked.name
    if asked is None or asked in (VectorizedEngine, CompiledEngine):
        compile = True if asked is CompiledEngine else compile
        clients, state = first_round()
        arguments = asked is None, compile, rounds, federation, algorithm, clients, state
        name, note = on_rank_zero(federation.fabric, _decide, *arguments)
        return find_engine(name), note
    _, note = on_rank_zero(federation.fabric, _check, asked, federation, algorithm)
    return asked, note


def known_engine(engine: str | type[Engine], compile: bool | Literal["auto"], known: str) -> tuple[type[Engine], str]:
    """The engine that a run has used so far, without a trial, and what the header says of it.

    Args:
        engine: what is asked for.
        compile: whether stacks are compiled; ``"auto"`` for whatever was chosen.
        known: the name of the engine so far.
    """
    if engine == AUTO and not is_registered(known):
        raise ConfigurationError(
            f"The checkpoint's run used the engine `{known}`, which is not registered.",
            "Give its class or import path as `engine`.",
        )
    found = find_engine(known if engine == AUTO else engine)
    if found is VectorizedEngine and (compile is True or (compile == AUTO and known == CompiledEngine.name)):
        found = CompiledEngine
    if found is CompiledEngine and engine == AUTO and compile is False:
        found = VectorizedEngine
    if found.name != known:
        raise ConfigurationError(
            f"The checkpoint's run used the {known} engine, and the {found.name} one would round differently.",
            "Use the same, or leave out `engine` and `compile`; or start a new run.",
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
    auto: bool,
    compile: bool | Literal["auto"],
    rounds: int,
    federation: Federation,
    algorithm: LocalTraining,
    clients: list[Client],
    state: GlobalState,
) -> tuple[str, str]:
    """Whether clients are vectorized and compiled, and what the header says; an error if that was asked for in vain."""
    if auto and len(clients) < 2:
        return "sequential", "sequential (too few clients per rank to vectorize)"
    obstacle = VectorizedEngine.obstacle(federation, algorithm)
    if obstacle is None and any(isinstance(client.data, ClientStream) for client in clients):
        obstacle = READ_IN_TURN
    tried = _try(federation, algorithm, clients, state, auto) if obstacle is None and clients else _Trial(obstacle)
    if not auto and tried.obstacle is not None:
        raise ConfigurationError(
            f"The clients cannot be vectorized: {tried.obstacle}.", 'Use `engine="auto"` or "sequential".'
        )
    if tried.obstacle is not None:
        return SequentialEngine.name, f"sequential (not vectorized: {tried.obstacle})"
    reason = "`compile=False`" if compile is False else None
    if compile == AUTO:
        reason = "there are no clients in the first round"
        if tried.cost is not None:
            draws = tried.draws, algorithm.draws_steps
            reason = reason_not_to_compile(federation, tried.cost, tried.stacks, rounds, *draws)
    name = CompiledEngine.name if reason is None else VectorizedEngine.name
    kind, more = ("vectorized and compiled", "") if reason is None else ("vectorized", f", not compiled ({reason})")
    if not auto:
        return name, kind + more
    sequential, speed = _is_slower(name, tried, federation)
    if sequential:
        return SequentialEngine.name, f'sequential ({speed}; engine="sequential" fixes the choice)'
    fixed = f'engine="{name}" fixes the choice'
    return name, f"{kind} ({speed}; {fixed}){more}"


def _is_slower(name: str, tried: _Trial, federation: Federation) -> tuple[bool, str]:
    """Whether training in stacks is slower than one by one, and by how much."""
    speedup, threads, device = 0.0, torch.get_num_threads(), federation.fabric.device.type
    if tried.cost is not None:
        speedup = predicted_speedup(tried.cost, tried.stacks, device, threads, name == CompiledEngine.name)
    largest = max(len(plan.sizes) for plan in tried.stacks)
    stacks = f"stacks of {'' if len(tried.stacks) == 1 else 'up to '}{largest}"
    slower = speedup < _LEAST_SPEEDUP
    be = "would be" if slower else "are"
    return slower, f"{stacks} {be} about {speedup:.1f} times as fast as one by one, by counting what there is to do"


def _try(
    federation: Federation, algorithm: LocalTraining, clients: list[Client], state: GlobalState, auto: bool
) -> _Trial:
    """Compare a few steps of a few clients."""
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
            found = _compare(federation, sequential, vectorized, tried, short, auto)
    finally:
        sequential.close()
    vectorized.fewest_together = type(vectorized).fewest_together
    return found._replace(stacks=vectorized.stacks(clients, state.work))


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
) -> _Trial:
    """An obstacle, if there is one, and what one client's step is like."""
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
                return _Trial(f"its training step changes `{changed[0]}`")
            drawn = drawn_from(state.seed, state.round, client.index, Purpose.LOCAL_STEPS, federation.fabric.device)
            random = random or bool(drawn)
        except ClientError as error:
            # The run itself meets those that fail, and says so with the right round.
            problem = error.problem.rstrip(".")
        if len(few) == _TRIAL_CLIENTS:
            break
    if not few:
        return _Trial(f"its training step failed in a trial with {problem}")
    if random and auto:
        return _Trial("it draws random numbers in its steps, and would draw others")
    if cost.fused is not None and auto:
        return _Trial("its recurrent layers run as one kernel only one by one")
    try:
        with CostCounter() as counter:
            found = _deltas(vectorized, few, state)
        cost.stacked = _of_vmapped_step(counter.cost, vectorized.stacks(few, state.work))
        tolerance = UPDATE_TOLERANCE[federation.parameters.vector.dtype]
        if not random and not (difference := relative_difference(expected, found)) <= tolerance:
            return _Trial(f"its updates differ from the sequential ones by {difference:.1e}")
    except ClientError as error:
        return _Trial(short_reason(error.__cause__ or error))
    finally:
        vectorized.release()
    return _Trial(None, cost=cost, draws=random)


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
