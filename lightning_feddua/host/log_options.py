"""How a module logs a name, and the names that Trainer makes of it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor

# Whom a value is logged for, as Trainer tells them apart.
LogTarget = Literal["callback", "logger", "prog_bar"]


class LogOptions(NamedTuple):
    """How a name was logged.

    Args:
        on_step: whether with its value in each step.
        on_epoch: whether with its value over a pass.
        prog_bar: whether for the progress bar.
        logger: whether for loggers.
    """

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool

    def is_for(self, target: LogTarget) -> bool:
        """Whether callbacks, loggers or progress bars get it."""
        return target == "callback" or (self.logger if target == "logger" else self.prog_bar)

    def named(self, target: LogTarget, name: str, step: Any, epoch: Any, newest_is_step: bool) -> dict[str, Any]:
        """The values under the names that Trainer gives them: with both, ``name_step`` and ``name_epoch``."""
        if not self.is_for(target):
            return {}
        if not (self.on_step and self.on_epoch):
            one = step if self.on_step else epoch if self.on_epoch else None
            return {} if one is None else {name: one}
        values = {f"{name}_step": step, f"{name}_epoch": epoch}
        if target == "callback":
            values[name] = step if epoch is None or (newest_is_step and step is not None) else epoch
        return {key: value for key, value in values.items() if value is not None}


MEAN_ONLY = LogOptions(on_step=False, on_epoch=True, prog_bar=False, logger=True)


def nothing_logged(target: LogTarget) -> dict[str, Tensor]:
    """What there is for a target where nothing has been logged."""
    return {}
