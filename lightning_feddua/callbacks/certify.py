from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.certificates.certificate import certify

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class Certify(FederatedCallback):
    """Ends each round with a certificate, on which all ranks must agree before anything is saved."""

    def __init__(self) -> None:
        self._cohort: list[int] = []

    def on_round_start(self, loop: FederatedLoop, round: int, cohort: list[int]) -> None:
        """Remember who takes part."""
        self._cohort = cohort

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Certify the round, as the user's callbacks have left it."""
        assert loop._federation is not None
        loop.run.certificates.append(certify(loop, loop._federation, self._cohort))
