"""How much faster clients train in stacks than one by one, predicted from counts, so that no clock decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_feddua.engines.step_cost import StepCost


@dataclass(frozen=True)
class _Device:
    """What a local step takes on a kind of device, in seconds; ``stacked`` for a step of a whole stack.

    Args:
        step: each step.
        kernel: each kernel.
        stacked_step: each step of a stack.
        stacked_kernel: each kernel of it.
        flop: a floating-point operation.
        byte: a byte that is written.
        stacked_work: how many times longer operations and bytes take in a stack, which no cache can hold.
        spread: how much of the work of one client other threads can take over; that of a stack they share evenly.
    """

    step: float
    kernel: float
    stacked_step: float
    stacked_kernel: float
    flop: float
    byte: float
    stacked_work: float
    spread: float


# Fitted to 13 models; `python -m tests.benchmarks prediction` shows how well they do.
_CPU = _Device(180e-6, 9e-6, 800e-6, 47e-6, 1 / 70e9, 1 / 7.5e9, 1.8, 0.4)
# Guessed: kernels take as long to start, and work is done in no time.
_ACCELERATOR = _Device(180e-6, 12e-6, 800e-6, 50e-6, 1 / 10e12, 1 / 500e9, 1.3, 0.0)


def predicted_speedup(cost: StepCost, stacks: Sequence[tuple[int, int]], device: str, threads: int) -> float:
    """How many times faster clients train in stacks than one by one.

    Args:
        cost: of one client's step.
        stacks: the number of clients and of steps of each.
        device: the type of device.
        threads: of local steps, on a CPU.
    """
    known = _CPU if device == "cpu" else _ACCELERATOR
    threads = threads if device == "cpu" else 1
    work = cost.flops * known.flop + cost.bytes * known.byte
    alone = known.step + known.kernel * cost.kernels + work / (1 + known.spread * (threads - 1))
    start = known.stacked_step + known.stacked_kernel * cost.kernels
    stacked = known.stacked_work * work / threads
    one_by_one = sum(size * steps * alone for size, steps in stacks)
    together = sum(steps * (start + size * stacked) for size, steps in stacks)
    return one_by_one / together if together > 0 else 0.0
