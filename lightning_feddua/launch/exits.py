"""How a process ends that SIGTERM or Ctrl-C has reached, itself or another rank."""

from __future__ import annotations

from signal import SIGINT, SIGTERM

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_feddua._private import start_method

# What a shell reports of a process that SIGTERM has ended.
EXIT_CODE = 128 + SIGTERM


class SignalExit(SystemExit):
    """The end of a process by a signal.

    Args:
        code: its exit code.
        signal_number: the signal.
    """

    def __init__(self, code: int, signal_number: int) -> None:
        super().__init__(code)
        self.signal_number = int(signal_number)


def exit_code(fabric: Fabric) -> int:
    """The code by which this process says that SIGTERM has ended it."""
    return 0 if _started_by_rank_zero(fabric) else EXIT_CODE


def ending(fabric: Fabric, number: int) -> BaseException:
    """What to raise after a signal: the end of the process, or KeyboardInterrupt."""
    if number == SIGTERM:
        return SignalExit(exit_code(fabric), number)
    return SignalExit(0, number) if _started_by_rank_zero(fabric) else KeyboardInterrupt()


def ending_signal(error: BaseException) -> int | None:
    """The signal that an exception stands for, if any."""
    if isinstance(error, KeyboardInterrupt):
        return SIGINT
    return error.signal_number if isinstance(error, SignalExit) else None


def _started_by_rank_zero(fabric: Fabric) -> bool:
    """Whether rank 0 would be killed, and its exit code with it, if this one ended with any other code than 0."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    forked = (start_method(fabric.strategy) or "popen") != "popen"
    return isinstance(environment, LightningEnvironment) and fabric.global_rank > 0 and not forked
