"""The real Trainer, which the loop is compared with."""

from lightning import Trainer


def quiet_trainer(**arguments):
    """A Trainer on one CPU that prints, logs and saves nothing, unless asked to."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**quiet, **arguments})
