from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.loop import FederatedLoop


class FederatedCallback:
    """Something that happens during a federated run.

    Every hook is called on every rank. A subclass overrides what it needs and may leave out arguments it does not use:
    Fabric passes those that a method names. In ``on_aggregate_end`` the server comes last, so a callback may still
    change the update (clip it, add noise); in ``on_round_end`` the new weights and the round's row of ``loop.history``
    are there.
    """

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Before the first round; the module is on its device."""

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """After the last round; the module holds the final global weights."""

    def on_round_start(self, loop: FederatedLoop, round: int, cohort: list[int]) -> None:
        """Before local training; ``cohort`` are the clients' places in the data module."""

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """After the server's step and validation."""

    def on_client_start(self, loop: FederatedLoop, round: int, client_id: str) -> None:
        """Before a client's local steps, on the rank that trains it."""

    def on_client_end(self, loop: FederatedLoop, round: int, client_id: str) -> None:
        """After a client's local steps, on the rank that trained it.

        The module holds the client's weights, but for ``engine="vectorized"``, where there are none of one client.
        """

    def on_aggregate_end(self, loop: FederatedLoop, update: RoundUpdate) -> None:
        """When the round's update is complete on every rank."""

    def on_validation_start(self, loop: FederatedLoop) -> None:
        """Before validation of the global model."""

    def on_validation_end(self, loop: FederatedLoop, metrics: dict[str, float]) -> None:
        """After validation of the global model."""

    def on_exception(self, loop: FederatedLoop, exception: BaseException) -> None:
        """When the run is about to end by an exception, Ctrl-C among them."""

    def state_dict(self) -> dict[str, Any]:
        """What later rounds depend on, as tensors and plain values, for checkpoints; called on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
