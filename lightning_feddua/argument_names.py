"""Arguments that the loop does not have, and those that somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_feddua.errors import ConfigurationError, instead_of

# Arguments of Trainer, and what to write here.
_OF_TRAINER = {
    "max_epochs": "Use `max_rounds`.",
    "min_epochs": "Use `max_rounds`.",
    "max_steps": "Use `max_rounds`, and `local_steps` for the steps of each client in a round.",
    "logger": "Use `loggers`.",
    "default_root_dir": "Use `out_dir`.",
    "check_val_every_n_epoch": "Use `validate_every`, which counts rounds.",
    "val_check_interval": "Use `validate_every`, which counts rounds.",
    "plugins": "Use `precision` or `strategy`, which take objects.",
    "ckpt_path": "Give it to `fit`; on the command line it is `--ckpt_path`.",
    "max_time": "Use Lightning's `Timer` among the `callbacks`.",
    "deterministic": "Leave it out, or call `torch.use_deterministic_algorithms`.",
}


def check_names(given: Iterable[str], allowed: Iterable[str]) -> None:
    """One clear error for an argument that the loop does not have."""
    known = list(allowed)
    for name in given:
        if name not in known:
            raise ConfigurationError(f"`FederatedLoop` has no argument `{name}`.", loop_argument(name, known))


def loop_argument(name: str, allowed: Iterable[str]) -> str:
    """What to write instead of an argument that the loop does not have, as a sentence."""
    return _OF_TRAINER.get(name) or instead_of(name, allowed)
