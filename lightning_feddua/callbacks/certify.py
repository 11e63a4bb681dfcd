from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.certificates.certificate import certify
from lightning_feddua.certificates.finite_state import check_state, flawed_state

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class Certify(FederatedCallback):
    """Ends each round with a certificate, on which all ranks must agree before anything is saved."""

    def __init__(self) -> None:
        self._cohort: list[int] = []
        self._excused: set[str] = set()

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Remember what is not finite and belongs there."""
        assert loop._federation is not None
        self._excused = set(flawed_state(loop, loop._federation))

    def on_round_start(self, loop: FederatedLoop, round: int, cohort: list[int]) -> None:
        """Remember who takes part."""
        self._cohort = cohort

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Certify the round, as the user's callbacks have left it."""
        assert loop._federation is not None
        # A rank that is alone with a wrong value is named first.
        certificate = certify(loop, loop._federation, self._cohort)
        check_state(loop, loop._federation, self._excused)
        loop.run.certificates.append(certificate)
