"""Where the clients of a round train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_feddua.aggregation.transforms import UpdateTransform
from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.aggregation.workspace import Workspace

if TYPE_CHECKING:
    from lightning_feddua.clients import LocalTraining
    from lightning_feddua.engines.base import ClientEvents
    from lightning_feddua.host.federation import Federation
    from lightning_feddua.settings import RunSettings


@dataclass(frozen=True)
class Training:
    """What a backend is to train.

    Args:
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        settings: the loop's settings.
        transforms: what changes updates, ``max_update_norm`` first.
        weights: the global weights, which the server moves in place.
        workspace: lends memory while a cohort trains.
    """

    federation: Federation
    algorithm: LocalTraining
    settings: RunSettings
    transforms: Sequence[UpdateTransform]
    weights: Tensor
    workspace: Workspace


class Backend(ABC):
    """Turns a cohort into the update of a round. The server does not know where the clients are.

    The loop calls :meth:`set_up` and then :meth:`start` once in each fit, and :meth:`run` in each round, on every rank.
    """

    # What a checkpoint remembers of how clients were run, and what the header says of it.
    engine_name: str = ""
    engine_note: str = ""
    # Whether the bits of an update depend on how many ranks there are.
    depends_on_ranks: bool = False
    # Whether a rank asked, in the last round, to end the run after it; the same on every rank.
    stop: bool = False

    @abstractmethod
    def set_up(self, training: Training) -> None:
        """Begin a run."""

    @abstractmethod
    def start(self, cohort: list[int], known_engine: str | None = None) -> None:
        """Get ready for rounds, after a checkpoint, if any, has been loaded; a collective.

        Args:
            cohort: the first round's, for whatever is to be tried.
            known_engine: ``engine_name`` of the run that is resumed.
        """

    @abstractmethod
    def run(self, round: int, cohort: list[int], events: ClientEvents, stop: Callable[[], bool]) -> RoundUpdate:
        """Train a cohort from the global weights; a collective. The update holds until the next round.

        Args:
            round: the round.
            cohort: the clients, as places in the data module.
            events: what to call for each client of this rank.
            stop: asked when the clients are trained: whether this rank wants the run to end after this round.

        Raises:
            ClientError: a client failed, and that ends the run; on other ranks a ``RankError``.
        """

    def kept_fingerprint(self) -> int:
        """A number that depends on every bit of what clients keep between rounds, as far as it is on this rank.

        Those of all ranks add up to the same number, whoever keeps what.
        """
        return 0

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What clients keep between rounds, for checkpoints; a collective."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
