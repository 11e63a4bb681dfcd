"""The logger that a module finds where the run has none."""

from __future__ import annotations

from typing import Any

from lightning.fabric.loggers import Logger


class Silence:
    """Takes any call, attribute, item or ``with`` block, and does nothing: an experiment that nobody looks at."""

    def __getattr__(self, name: str) -> Silence:
        # Python asks for these to find out what an object can do.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        """Nothing."""
        return self

    def __getitem__(self, key: Any) -> Silence:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(())


class QuietLogger(Logger):
    """Has a folder and an ``experiment``, as the default logger of Trainer does, and writes nothing.

    It is the view's alone: Fabric does not know it, and neither do checkpoints.

    Args:
        folder: the run's folder.
    """

    name = "lightning_logs"
    version = 0

    def __init__(self, folder: str) -> None:
        self.save_dir = folder
        self.experiment = Silence()

    @property
    def root_dir(self) -> str:
        """The run's folder."""
        return self.save_dir

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return self.save_dir

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Nothing."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Silence:
        # What other loggers have: `log_image`, `watch`, `run_id`, …
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self)["experiment"]
