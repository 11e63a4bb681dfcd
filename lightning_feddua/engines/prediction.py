"""How much faster clients train in stacks than one by one, predicted from counts, so that no clock decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from lightning_feddua.engines.stack_parts import StackPlan
from lightning_feddua.engines.step_cost import StepCost


@dataclass(frozen=True)
class OneByOne:
    """What there is to do where clients train one after another; or how long each of it takes, in seconds.

    Args:
        client: a client.
        step: a local step.
        kernel: a kernel.
        convolution: a convolution, or its gradient.
        flop: a floating-point operation.
        byte: a byte that is written.
    """

    client: float = 0.0
    step: float = 0.0
    kernel: float = 0.0
    convolution: float = 0.0
    flop: float = 0.0
    byte: float = 0.0


@dataclass(frozen=True)
class Together:
    """The same where they train in stacks.

    Args:
        client: a client.
        step: a step of a stack: the optimizer's, and what the algorithm does.
        vmapped: a vmapped step of clients of a stack.
        vmapped_kernel: a kernel in it.
        single: a step of a client of a stack alone.
        single_kernel: a kernel in it.
        convolution: a convolution of either, or its gradient.
        flop: a floating-point operation of any of these.
        byte: a byte that is written, which caches can hold less often.
    """

    client: float = 0.0
    step: float = 0.0
    vmapped: float = 0.0
    vmapped_kernel: float = 0.0
    single: float = 0.0
    single_kernel: float = 0.0
    convolution: float = 0.0
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


# Fitted by `python -m tests.benchmarks prediction`, which also shows how well they do, and rounded.
_CPU = _Device(
    OneByOne(client=250e-6, step=15e-6, kernel=6.3e-6, convolution=180e-6, flop=1 / 98e9, byte=1 / 8.2e9),
    Together(
        client=60e-6,
        step=130e-6,
        vmapped=400e-6,
        vmapped_kernel=6.5e-6,
        single=20e-6,
        single_kernel=4.7e-6,
        convolution=350e-6,
        flop=1 / 105e9,
        byte=1 / 5.6e9,
    ),
    spread=0.4,
)
# Guessed: the host takes as long to start kernels, and they are done in no time.
_ACCELERATOR = _Device(
    replace(_CPU.one_by_one, kernel=10e-6, convolution=10e-6, flop=1 / 10e12, byte=1 / 500e9),
    replace(_CPU.together, vmapped_kernel=10e-6, single_kernel=7e-6, convolution=20e-6, flop=1 / 8e12, byte=1 / 400e9),
    spread=0.0,
)


def counted(cost: StepCost, stacks: Sequence[StackPlan]) -> tuple[OneByOne, Together]:
    """What there is to do one by one and in stacks.

    Args:
        cost: of one client's step.
        stacks: what the clients of each stack do.
    """
    clients = sum(len(plan.sizes) for plan in stacks)
    alone = samples = steps = vmapped = singles = 0
    in_vmapped = in_singles = 0
    for sizes, parts in (step for plan in stacks for step in plan.steps()):
        steps += 1
        alone += len(sizes)
        samples += sum(sizes)
        for part in parts:
            computed = len(part.places) * sizes[part.rows[0]]
            if part.alone:
                singles, in_singles = singles + 1, in_singles + computed
            else:
                vmapped, in_vmapped = vmapped + 1, in_vmapped + computed
    kernels, convolutions, stacked = cost.kernels, cost.convolutions, cost.stacked or cost
    flops, bytes, stacked_bytes = (count / cost.samples for count in (cost.flops, cost.bytes, stacked.bytes))
    return (
        OneByOne(clients, alone, alone * kernels, alone * convolutions, samples * flops, samples * bytes),
        Together(
            clients,
            steps,
            vmapped,
            vmapped * stacked.kernels,
            singles,
            singles * kernels,
            (vmapped + singles) * convolutions,
            (in_vmapped + in_singles) * flops,
            in_vmapped * stacked_bytes + in_singles * bytes,
        ),
    )


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
    more = threads - 1 if device == "cpu" else 0
    one_by_one, together = counted(cost, stacks)
    alone = _seconds(one_by_one, known.one_by_one, 1 + known.spread * more)
    stacked = _seconds(together, known.together, 1 + more)
    stacked -= saved_by_compilation(cost, stacks, device) if compiled else 0.0
    return alone / stacked if stacked > 0 else 0.0


def saved_by_compilation(cost: StepCost, stacks: Sequence[StackPlan], device: str) -> float:
    """About how many seconds of a round compiled steps save: nearly all but the work itself.

    Args:
        cost: of one client's step.
        stacks: what the clients of each stack do, all of them together.
        device: the type of device.
    """
    _, together = counted(cost, stacks)
    started = replace(together, client=0, convolution=0, flop=0, byte=0)
    return _SAVED * _seconds(started, _of(device).together, 1)


def _of(device: str) -> _Device:
    return _CPU if device == "cpu" else _ACCELERATOR


def _seconds(counts: OneByOne | Together, seconds: OneByOne | Together, workers: float) -> float:
    """How long something takes; operations and bytes, which come last, are shared by workers."""
    each = [count * known for count, known in zip(astuple(counts), astuple(seconds), strict=True)]
    return sum(each[:-2]) + sum(each[-2:]) / workers
