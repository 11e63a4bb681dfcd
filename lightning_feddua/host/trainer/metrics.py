"""What a run and the client in training have logged, under the names that Trainer gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_feddua.host.log_options import MEAN_ONLY, LogOptions, LogTarget, nothing_logged


class TrainerMetrics:
    """``trainer.callback_metrics`` and its like."""

    def __init__(self) -> None:
        self._round_metrics: dict[str, Tensor] = {}
        # How clients have logged, by name.
        self.log_options: dict[str, LogOptions] = {}
        # What the module has logged since: in this client, or in this validation.
        self.logged_since: Callable[[LogTarget], dict[str, Tensor]] = nothing_logged

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest round's metrics, and what the client in training, or a validation at its end, has logged."""
        return {**self._of_round("callback"), **self.logged_since("callback")}

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Those of them that loggers get."""
        return {**self._of_round("logger"), **self.logged_since("logger")}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the client in training has logged with ``prog_bar``, as numbers."""
        return {name: value.item() for name, value in self.logged_since("prog_bar").items()}

    def logged_names(self) -> set[str]:
        """Under which names clients on this rank have logged something, as Trainer names it."""
        return {
            key for name, options in self.log_options.items() for key in options.named("callback", name, 0, 0, False)
        }

    def take_round(self, row: Mapping[str, Any]) -> None:
        """Take what is known of the round, to show it from now on."""
        self._round_metrics |= {name: torch.tensor(value) for name, value in row.items()}

    def _of_round(self, target: LogTarget) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, value in self._round_metrics.items():
            found |= self.log_options.get(name, MEAN_ONLY).named(target, name, value, value, newest_is_step=False)
        return found
