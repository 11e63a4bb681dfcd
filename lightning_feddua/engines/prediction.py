"""How much faster clients train in stacks than one by one, predicted from counts, so that no clock decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_feddua.engines.stack_parts import StackPlan
from lightning_feddua.engines.step_cost import StepCost


@dataclass(frozen=True)
class _Device:
    """What a local step takes on a kind of device, in seconds; ``stacked`` for a step of a whole stack.

    Args:
        step: each step.
        kernel: each kernel.
        shared_step: each step of a stack: the optimizer's, and what the algorithm does.
        stacked_step: each vmapped step of clients of it.
        stacked_kernel: each kernel of that.
        single: each step of a client of it that is made alone.
        single_kernel: each kernel of that.
        flop: a floating-point operation.
        byte: a byte that is written.
        stacked_work: how many times longer operations and bytes take in a stack, which no cache can hold.
        spread: how much of the work of one client other threads can take over; that of a stack they share evenly.
    """

    step: float
    kernel: float
    shared_step: float
    stacked_step: float
    stacked_kernel: float
    single: float
    single_kernel: float
    flop: float
    byte: float
    stacked_work: float
    spread: float


# Fitted to 13 models; `python -m tests.benchmarks prediction` shows how well they do.
_CPU = _Device(180e-6, 9e-6, 200e-6, 600e-6, 47e-6, 150e-6, 6e-6, 1 / 70e9, 1 / 7.5e9, 1.8, 0.4)
# Guessed: kernels take as long to start, and work is done in no time.
_ACCELERATOR = _Device(180e-6, 12e-6, 200e-6, 600e-6, 50e-6, 150e-6, 8e-6, 1 / 10e12, 1 / 500e9, 1.3, 0.0)


# Of what starting the kernels of a stack's step takes, so much is saved by compilation.
_SAVED = 0.9


def predicted_speedup(
    cost: StepCost, stacks: Sequence[StackPlan], device: str, threads: int, compiled: bool = False
) -> float:
    """How many times faster clients train in stacks than one by one.

    Args:
        cost: of one client's step.
        stacks: what the clients of each stack do.
        device: the type of device.
        threads: of local steps, on a CPU.
        compiled: whether the steps of stacks are compiled.
    """
    known = _of(device)
    threads = threads if device == "cpu" else 1
    seconds = (cost.flops * known.flop + cost.bytes * known.byte) / cost.samples
    work = seconds / (1 + known.spread * (threads - 1))
    stacked_work = known.stacked_work * seconds / threads
    one_by_one = together = 0.0
    for samples, parts in (step for plan in stacks for step in plan.steps()):
        one_by_one += len(samples) * (known.step + known.kernel * cost.kernels) + sum(samples) * work
        together += known.shared_step
        for part in parts:
            size = samples[part.rows[0]]
            if part.alone:
                together += known.single + known.single_kernel * cost.kernels + size * work
            else:
                together += known.stacked_step + known.stacked_kernel * cost.kernels
                together += len(part.places) * size * stacked_work
    together -= saved_by_compilation(cost, stacks, device) if compiled else 0.0
    return one_by_one / together if together > 0 else 0.0


def saved_by_compilation(cost: StepCost, stacks: Sequence[StackPlan], device: str) -> float:
    """About how many seconds of a round compiled steps save.

    Args:
        cost: of one client's step.
        stacks: what the clients of each stack do, all of them together.
        device: the type of device.
    """
    known = _of(device)
    steps = sum(1 for plan in stacks for _ in plan.steps())
    return _SAVED * steps * (known.shared_step + known.stacked_step + known.stacked_kernel * cost.kernels)


def _of(device: str) -> _Device:
    return _CPU if device == "cpu" else _ACCELERATOR
