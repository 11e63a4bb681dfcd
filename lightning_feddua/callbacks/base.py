from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.loop import FederatedLoop


class FederatedCallback:
    """Something that happens during a federated run.

    Every hook is called on every rank. A subclass overrides what it needs and may leave out arguments that it does not
    use. ``loop.run`` has the weights, the history and the folder of the run; each hook says what ``loop.module`` holds,
    on every engine and any number of ranks. ``loop.should_stop = True`` ends the run after the current round, on all
    ranks, even if it is set on one.

    Attributes:
        identity: plain values that decide the result of a run, by name: it can be resumed only with the same.
    """

    identity: Mapping[str, Any] = {}

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Before the first round. The module is on its device and holds the initial or resumed global weights."""

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """After the last round. The module holds the final global weights."""

    def on_round_start(self, loop: FederatedLoop, round: int, cohort: list[int]) -> None:
        """Before local training. The module holds the global weights.

        Args:
            loop: the loop.
            round: the round, from 0.
            cohort: the clients' places in the data module.
        """

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """After the server's step and validation. The module holds the new global weights.

        The round's row is the last of ``loop.history``.
        """

    def on_client_start(self, loop: FederatedLoop, round: int, client_id: str) -> None:
        """Before a client's local steps, on the rank that trains it. The module holds the global weights."""

    def on_client_end(self, loop: FederatedLoop, round: int, client_id: str) -> None:
        """After a client's local steps, on the rank that trained it. The module holds the client's own weights."""

    def on_aggregate_end(self, loop: FederatedLoop, update: RoundUpdate) -> None:
        """When the round's update is complete, on every rank.

        The server is a callback, too. Before it, a callback may still change the update, and the module holds the
        weights that the clients started from; after it, the new ones. Callbacks given to the loop come before it.
        """

    def on_validation_start(self, loop: FederatedLoop) -> None:
        """Before validation. The module holds what is validated: the average of the last two iterates, or the weights.

        It is the average for rules with an adaptive step. Their last iterate, whose metrics are ``last_iterate/…``, has
        been evaluated before.
        """

    def on_validation_end(self, loop: FederatedLoop, metrics: dict[str, float]) -> None:
        """After validation. The module still holds what was validated."""

    def on_exception(self, loop: FederatedLoop, exception: BaseException) -> None:
        """When the run is about to end by an exception, Ctrl-C included.

        The module holds the global weights: those that the clients of the round started from or, once the server has
        made its step, the new ones.
        """

    def state_dict(self) -> dict[str, Any]:
        """What later rounds depend on, as tensors and plain values, for checkpoints; called on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
