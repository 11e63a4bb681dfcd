"""Which engine runs a module's clients: what is asked for, or what a few real steps show to be fastest."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.engines.base import Client, Engine, GlobalState
from lightning_feddua.engines.sequential import SequentialEngine
from lightning_feddua.engines.vectorized import VectorizedEngine
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import Purpose, random_state, seed_generators

# Steps of a trial, and clients that the sequential engine tries them on.
_TRIAL_STEPS = 2
_TRIAL_CLIENTS = 2
# Relative difference of two engines' updates that counts as the same result. In float32 a flipped ReLU alone makes 1 %
# of a deep network's update; a wrong gradient makes 100 %.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 0.05}


def choose_engine(
    name: str, federation: Federation, algorithm: LocalTraining, clients: list[Client], state: GlobalState
) -> tuple[str, str]:
    """The name of a run's engine, and what the header says of it. Every rank gets the same; a collective.

    Args:
        name: ``"vectorized"`` or ``"auto"``.
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        clients: this rank's part of the first cohort, for a trial.
        state: the global state that the first round starts from.
    """
    decision = ("", "")
    if federation.fabric.is_global_zero:
        decision = _decide(name, federation, algorithm, clients, state)
    chosen, note = federation.fabric.broadcast(decision)
    if chosen == "":
        raise ConfigurationError(f"The clients cannot be vectorized: {note}.", 'Use `engine="auto"` or "sequential".')
    return chosen, note


def known_engine(name: str, known: str) -> tuple[str, str]:
    """The engine that a run has used so far, without a trial, and what the header says of it.

    Args:
        name: what is asked for.
        known: the name of the engine so far.
    """
    if name not in ("auto", known):
        raise ConfigurationError(
            f"The checkpoint's run used the {known} engine, and `engine={name}` would round differently.",
            'Use the same or `engine="auto"`, or start afresh.',
        )
    return known, f"{known}, as before"


def _decide(
    name: str, federation: Federation, algorithm: LocalTraining, clients: list[Client], state: GlobalState
) -> tuple[str, str]:
    """The engine to use and what to say of it; no engine, and the reason, where what was asked for is not possible."""
    if name == "auto" and len(clients) < 2:
        return "sequential", "sequential (too few clients a rank to vectorize)"
    obstacle = VectorizedEngine.obstacle(federation, algorithm)
    speedup = 0.0
    if obstacle is None and clients:
        obstacle, speedup = _try(federation, algorithm, clients, state, timed=name == "auto")
    if name == "vectorized":
        return ("", obstacle) if obstacle is not None else ("vectorized", "vectorized")
    if obstacle is not None:
        return "sequential", f"sequential (not vectorized: {obstacle})"
    if speedup <= 1:
        return "sequential", f"sequential (vectorized x{len(clients)}: {speedup:.2f} times its speed)"
    return "vectorized", f"vectorized x{len(clients)}: {speedup:.1f} times sequential"


def _try(
    federation: Federation, algorithm: LocalTraining, clients: list[Client], state: GlobalState, timed: bool
) -> tuple[str | None, float]:
    """An obstacle that shows in a trial, and how many times faster the vectorized engine is there."""
    with preserved_attributes(federation.module) as changed:
        obstacle, speedup = _compare(federation, algorithm, clients, state, timed)
    if obstacle is None and (kept := changed()):
        obstacle = f"its training step keeps tensors in `self.{kept[0]}`"
    return obstacle, speedup


def _compare(
    federation: Federation, algorithm: LocalTraining, clients: list[Client], state: GlobalState, timed: bool
) -> tuple[str | None, float]:
    steps = min(_TRIAL_STEPS, state.work.batches(len(clients[0].data)))
    state = replace(state, work=replace(state.work, steps=steps, epochs=None))
    size, dtype = state.weights.numel(), state.weights.dtype

    def states() -> ClientStates:
        """Of the trial alone."""
        return ClientStates(federation.fabric, algorithm.client_state, size, dtype)

    sequential = SequentialEngine(federation, algorithm, states())
    vectorized = VectorizedEngine(federation, algorithm, states())
    few, expected, random, problem = [], [], False, ""
    for client in clients:
        try:
            expected += _deltas(sequential, [client], state)
            few.append(client)
            random = random or _drew_numbers(client, state, federation.fabric.device)
        except ClientError as error:
            # The run itself meets those that fail, and says so with the right round.
            problem = error.problem.rstrip(".")
        if len(few) == _TRIAL_CLIENTS:
            break
    if not few:
        return f"its training step failed in a trial with {problem}", 0.0
    if random and timed:
        return "it draws random numbers in its steps, and would draw others", 0.0
    try:
        found = _deltas(vectorized, few, state)
        if not random and (difference := _difference(expected, found)) > _TOLERANCE[state.weights.dtype]:
            return f"its updates differ from the sequential ones by {difference:.1e}", 0.0
        if not timed:
            return None, 0.0
        fast = _seconds(vectorized, clients, state) / len(clients)
    except ClientError as error:
        reason = " ".join(str(error.__cause__).split())
        return reason[:200].rstrip("."), 0.0
    finally:
        vectorized.release()
    return None, _seconds(sequential, few, state) / len(few) / fast


@contextmanager
def preserved_attributes(module: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Give a module's own attributes back as they were; the value tells which got other tensors in between.

    What a training step keeps under vmap is of no use outside, and would break the next step that reads it.
    """
    registries = ("_parameters", "_buffers", "_modules")
    containers = (list, dict, set)
    before = {
        (path, name): (owner, value, copy.copy(value) if isinstance(value, containers) else None)
        for path, owner in module.named_modules()
        for name, value in vars(owner).items()
        if name not in registries
    }
    changed: list[str] = []
    yield lambda: changed
    for path, owner in module.named_modules():
        for name, value in list(vars(owner).items()):
            if name in registries:
                continue
            known = before.get((path, name))
            if known is None:
                delattr(owner, name)
            elif known[1] is not value:
                object.__setattr__(owner, name, known[1])
            elif known[2] is not None and not _same_items(known[2], value):
                value.clear()
                value.extend(known[2]) if isinstance(value, list) else value.update(known[2])
            else:
                continue
            # torch's own modules, such as an LSTM with its list of weights, mend themselves.
            own = not type(owner).__module__.startswith("torch.")
            if own and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                changed.append(f"{path}.{name}".lstrip("."))


def _same_items(first: list[Any] | dict[Any, Any] | set[Any], second: Any) -> bool:
    """Whether two containers hold the same objects; tensors cannot be compared with ``==``."""
    if isinstance(first, set) or len(first) != len(second):
        return first == second
    if isinstance(first, dict):
        return all(key in second and second[key] is value for key, value in first.items())
    return all(a is b for a, b in zip(first, second, strict=True))


def _drew_numbers(client: Client, state: GlobalState, device: torch.device) -> bool:
    """Whether the local steps of the client that has just been trained drew random numbers, as dropout does."""
    after = random_state(device)
    seed_generators(state.seed, state.round, client.index, Purpose.LOCAL_STEPS, device)
    return not all(torch.equal(a, b) for a, b in zip(after, random_state(device), strict=True))


def _deltas(engine: Engine, clients: list[Client], state: GlobalState) -> list[Tensor]:
    deltas = []
    for result in engine.run(clients, state, lambda moment, client: None):
        if isinstance(result, ClientError):
            raise result
        deltas.append(result.delta.clone())
    return deltas


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    scale = max(delta.norm().item() for delta in expected)
    return max((a - b).norm().item() for a, b in zip(expected, found, strict=True)) / (scale or 1.0)


def _seconds(engine: Engine, clients: list[Client], state: GlobalState) -> float:
    """The time of one trial, after another that warms up."""
    for _ in range(2):
        start = time.perf_counter()
        last = _deltas(engine, clients, state)
        # Waits for the device.
        last[-1].sum().item()
    return time.perf_counter() - start
