"""What a user may ask of a loop: each check gives one clear error before any work starts."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_feddua.callbacks import Checkpoint, FederatedCallback
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.errors import ConfigurationError, choices


def with_checkpoint(
    callbacks: Sequence[FederatedCallback], checkpoint_every: int | None
) -> tuple[list[FederatedCallback], list[FederatedCallback]]:
    """Callbacks that do not save the run, and the one that does, if any."""
    others = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    saving = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ConfigurationError(
            f"`checkpoint_every={checkpoint_every}` is less than 1.", "Give a whole number from 1 up, or None."
        )
    if checkpoint_every is not None:
        saving.append(Checkpoint(checkpoint_every))
    if len(saving) > 1:
        raise ConfigurationError(
            f"There are {len(saving)} `Checkpoint`s, which would write the same files.",
            "Give one, or `checkpoint_every` alone.",
        )
    return others, list(saving)


def as_datamodule(datamodule: Any) -> FederatedDataModule:
    """A data module, or a mapping of datasets made into one."""
    if isinstance(datamodule, Mapping):
        return FederatedDataModule(datamodule)
    if not isinstance(datamodule, FederatedDataModule):
        raise ConfigurationError(
            f"The data is a `{type(datamodule).__name__}`, which has no clients.",
            "Give a `FederatedDataModule`, or a mapping of datasets by client name.",
        )
    return datamodule


def cohort_size(clients_per_round: int | float | None, population: int) -> int:
    """How many clients take part in a round."""
    if clients_per_round is None:
        return population
    if isinstance(clients_per_round, float):
        return max(1, round(clients_per_round * population))
    if clients_per_round > population:
        raise ConfigurationError(
            f"`clients_per_round={clients_per_round}` is more than the {population} clients there are.",
            "Choose fewer, or None for all.",
        )
    return clients_per_round


def check_settings(
    max_rounds: int,
    clients_per_round: int | float | None,
    local_steps: int | None,
    local_epochs: int | None,
    validate_every: int,
    seed: int,
) -> None:
    """The amount of work: numbers in their range, and local steps or epochs but not both."""
    if (local_steps is None) == (local_epochs is None):
        given = (
            "neither" if local_steps is None else f"both `local_steps={local_steps}` and `local_epochs={local_epochs}`"
        )
        raise ConfigurationError(
            f"The amount of local training is unclear: {given} of `local_steps` and `local_epochs` given.",
            "Give exactly one of the two.",
        )
    for name, value, least in (
        ("max_rounds", max_rounds, 0),
        ("local_steps", local_steps, 1),
        ("local_epochs", local_epochs, 1),
        ("validate_every", validate_every, 0),
        ("seed", seed, 0),
    ):
        if value is not None and value < least:
            raise ConfigurationError(f"`{name}={value}` is less than {least}.", f"Give a whole number from {least} up.")
    if isinstance(clients_per_round, float) and not 0 < clients_per_round <= 1:
        raise ConfigurationError(
            f"`clients_per_round={clients_per_round}` is not a fraction of the clients.",
            "Give a float in (0, 1], a whole number of clients, or None for all.",
        )
    if clients_per_round is not None and clients_per_round < 1 and not isinstance(clients_per_round, float):
        raise ConfigurationError(
            f"`clients_per_round={clients_per_round}` is less than 1.", "Choose at least one client."
        )


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in allowed:
        raise ConfigurationError(f"There is no {name} `{value}`.", f"Choose one of {choices(allowed)}.")


def check_positive(name: str, value: float | None) -> None:
    """Positive, if given."""
    if value is not None and not value > 0:
        raise ConfigurationError(f"`{name}={value}` is not positive.", "Give a positive number.")


def check_instance(name: str, value: Any, kind: type) -> None:
    """Of a class, if given."""
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"The {name} is `{value!r:.100}`.", f"Give an instance of `{kind.__name__}`.")
