"""Every random draw as a function of (seed, round, client, purpose)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Whose generators there are beside those of NumPy and Python.
TORCH = "torch"


class Purpose(IntEnum):
    """What a random draw is for; part of its seed, so that two uses never share a stream."""

    COHORT = 0
    MINIBATCHES = 1
    LOCAL_STEPS = 2
    EVALUATION = 3
    ROUND = 4
    DATA = 5
    SEARCH = 6
    TRANSFORM = 7


def generator(seed: int, round: int, client: int, purpose: Purpose) -> np.random.Generator:
    """The NumPy generator of one purpose, for one client in one round."""
    return np.random.default_rng([purpose, seed, round, client])


def seed_generators(seed: int, round: int, index: int, purpose: Purpose, device: torch.device) -> None:
    """Seed the global generators (Python, NumPy, torch) for one client's local steps, or one batch of validation."""
    words = np.random.SeedSequence([purpose, seed, round, index]).generate_state(2)
    value = int(words[0]) << 32 | int(words[1])
    random.seed(value)
    np.random.seed(words[0])
    # Not `torch.manual_seed`: it formats a stack trace for the CUDA queue on every call.
    torch.default_generator.manual_seed(value)
    if device.type != "cpu":
        torch.get_device_module(device.type).manual_seed(value)


def random_state(device: torch.device) -> list[Tensor]:
    """The state of torch's generators that a step on a device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device.type).get_rng_state()]


def drawn_from(seed: int, round: int, index: int, purpose: Purpose, device: torch.device) -> list[str]:
    """Whose generators have been drawn from since they were seeded like this; seeds them like this again."""
    after = _all_states(device)
    seed_generators(seed, round, index, purpose, device)
    return [name for name, state in _all_states(device).items() if state != after[name]]


def _all_states(device: torch.device) -> dict[str, Any]:
    """The states of all global generators, such that they can be compared."""
    numpy: Any = np.random.get_state()
    return {
        TORCH: [state.numpy().tobytes() for state in random_state(device)],
        "NumPy": (numpy[1].tobytes(), *numpy[2:]),
        "Python's `random`": random.getstate(),
    }


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    """Go back to a state that :func:`random_state` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device.type).set_rng_state(states[1])


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Leave the caller's global generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
