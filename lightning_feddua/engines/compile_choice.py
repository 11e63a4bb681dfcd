"""Whether it pays to compile the local steps of a run, by counting, so that neither a clock nor a cache decides."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

from lightning_feddua.engines.prediction import saved_by_compilation
from lightning_feddua.engines.stack_parts import StackPlan
from lightning_feddua.engines.step_cost import StepCost
from lightning_feddua.host.federation import Federation
from lightning_feddua.wording import counted

# Seconds that the compiler takes for its first function, for each kernel in it, and for each pair of these; as measured
# with an empty cache on two cores, for 140 to 1,280 kernels.
_START, _KERNEL, _PAIR = 10.0, 0.03, 1e-5
# The time that is saved must be so many times what the compiler takes, for it may take longer.
_MARGIN = 1.5


def reason_not_to_compile(
    federation: Federation,
    cost: StepCost,
    stacks: Sequence[StackPlan],
    rounds: int,
    draws: bool,
    draws_steps: bool,
) -> str | None:
    """Why local steps are not compiled, as the end of a sentence; None where it pays.

    Args:
        federation: the module and its clients.
        cost: of one client's step.
        stacks: what the clients of each stack of the first round do.
        rounds: the number of rounds.
        draws: whether steps draw random numbers.
        draws_steps: whether the number of steps is drawn.
    """
    device = federation.fabric.device.type
    if draws:
        return "its steps draw random numbers, and compiled ones would draw others"
    if federation.optimizers.schedulers:
        return "a scheduler changes learning rates between local steps"
    if draws_steps:
        return "the number of steps differs between rounds"
    if not _alike(federation, stacks):
        return "clients differ in size, and each cohort would have to be compiled"
    steps = {sum(1 for _ in plan.steps()) for plan in stacks}
    seconds = sum(_compile_seconds(cost.kernels * one) for one in steps)
    saved = saved_by_compilation(cost, stacks, device) * rounds
    if saved < _MARGIN * seconds:
        return f"{counted(rounds, 'round')} would save about {saved:.0f} s, and the compiler takes about {seconds:.0f}"
    if device == "cpu" and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        return "no C++ compiler was found"
    if device != "cpu" and find_spec("triton") is None:
        return "Triton was not found"
    return None


def _compile_seconds(kernels: float) -> float:
    """About how long the compiler takes for a function of so many kernels, where its cache does not have it."""
    return _START + _KERNEL * kernels + _PAIR * kernels**2


def _alike(federation: Federation, stacks: Sequence[StackPlan]) -> bool:
    """Whether all clients, as far as is known, have minibatches of the same shapes."""
    sizes = {size for plan in stacks for size in plan.sizes}
    if federation.datamodule.sizes_are_known:
        sizes |= set(federation.sizes.tolist())
    return len({tuple(federation.work.minibatch_sizes(size)) for size in sizes}) == 1
