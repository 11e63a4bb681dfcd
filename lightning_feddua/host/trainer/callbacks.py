"""The callbacks that Trainer would have, by their kinds."""

from __future__ import annotations

from typing import Any

from lightning_feddua.lightning_names import lightning_classes


class TrainerCallbacks:
    """``trainer.callbacks`` and its like."""

    callbacks: list[Any]

    def _callbacks_of(self, kind: str) -> list[Any]:
        return [callback for callback in self.callbacks if isinstance(callback, lightning_classes(kind))]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Lightning's checkpoint callbacks."""
        return self._callbacks_of("callbacks.Checkpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first of Lightning's checkpoint callbacks, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Lightning's callbacks for early stopping."""
        return self._callbacks_of("callbacks.EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first of Lightning's callbacks for early stopping, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The first of Lightning's progress bars, or None."""
        return next(iter(self._callbacks_of("callbacks.ProgressBar")), None)
