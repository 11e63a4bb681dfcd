"""How much faster clients train in stacks than one by one, predicted from counts, so that no clock decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from lightning_feddua.engines.stack_parts import StackPlan
from lightning_feddua.engines.step_cost import StepCost


@dataclass(frozen=True)
class OneByOne:
    """What there is to do where clients train one after another; or how long each of it takes, in seconds.

    Args:
        step: a local step.
        kernel: a kernel.
        flop: a floating-point operation.
        byte: a byte that is written.
    """

    step: float = 0.0
    kernel: float = 0.0
    flop: float = 0.0
    byte: float = 0.0


@dataclass(frozen=True)
class Together:
    """The same where they train in stacks.

    Args:
        step: a step of a stack: the optimizer's, and what the algorithm does.
        vmapped: a vmapped step of clients of a stack.
        vmapped_kernel: a kernel in it.
        single: a step of a client of a stack alone.
        single_kernel: a kernel in it.
        flop: a floating-point operation of any of these.
        byte: a byte that is written, which caches can hold less often.
    """

    step: float = 0.0
    vmapped: float = 0.0
    vmapped_kernel: float = 0.0
    single: float = 0.0
    single_kernel: float = 0.0
    flop: float = 0.0
    byte: float = 0.0


@dataclass(frozen=True)
class _Device:
    """How long things take on a kind of device.

    Args:
        one_by_one: in the sequential engine.
        together: in stacks.
        spread: how much of the work of one client other threads can take over; that of a stack they share evenly.
    """

    one_by_one: OneByOne
    together: Together
    spread: float


# Fitted by `python -m tests.benchmarks prediction`, which also shows how well they do.
_CPU = _Device(
    OneByOne(180e-6, 9e-6, 1 / 70e9, 1 / 7.5e9),
    Together(200e-6, 600e-6, 47e-6, 150e-6, 6e-6, 1.8 / 70e9, 1.8 / 7.5e9),
    0.4,
)
# Guessed: kernels take as long to start, and work is done in no time.
_ACCELERATOR = _Device(
    OneByOne(180e-6, 12e-6, 1 / 10e12, 1 / 500e9),
    Together(200e-6, 600e-6, 50e-6, 150e-6, 8e-6, 1.3 / 10e12, 1.3 / 500e9),
    0.0,
)


def counted(cost: StepCost, stacks: Sequence[StackPlan]) -> tuple[OneByOne, Together]:
    """What there is to do one by one and in stacks.

    Args:
        cost: of one client's step.
        stacks: what the clients of each stack do.
    """
    clients = samples = computed = 0
    steps = vmapped = singles = 0
    for sizes, parts in (step for plan in stacks for step in plan.steps()):
        steps += 1
        clients += len(sizes)
        samples += sum(sizes)
        for part in parts:
            singles += part.alone
            vmapped += not part.alone
            computed += len(part.places) * sizes[part.rows[0]]
    flops, bytes = cost.flops / cost.samples, cost.bytes / cost.samples
    kernels = cost.kernels
    return (
        OneByOne(clients, clients * kernels, samples * flops, samples * bytes),
        Together(
            steps, vmapped, vmapped * kernels, singles, singles * kernels, computed * flops, computed * bytes
        ),
    )  # fmt: skip


def predicted_speedup(cost: StepCost, stacks: Sequence[StackPlan], device: str, threads: int) -> float:
    """How many times faster clients train in stacks than one by one.

    Args:
        cost: of one client's step.
        stacks: what the clients of each stack do.
        device: the type of device.
        threads: of local steps, on a CPU.
    """
    known = _CPU if device == "cpu" else _ACCELERATOR
    more = threads - 1 if device == "cpu" else 0
    one_by_one, together = counted(cost, stacks)
    alone = _seconds(one_by_one, known.one_by_one, 1 + known.spread * more)
    stacked = _seconds(together, known.together, 1 + more)
    return alone / stacked if stacked > 0 else 0.0


def _seconds(counts: OneByOne | Together, seconds: OneByOne | Together, workers: float) -> float:
    """How long something takes; operations and bytes, which come last, are shared by workers."""
    each = [count * known for count, known in zip(astuple(counts), astuple(seconds), strict=True)]
    return sum(each[:-2]) + sum(each[-2:]) / workers
