"""Many clients in one step, and all their local steps in one compiled function."""

from __future__ import annotations

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.engines.base import register_engine
from lightning_feddua.engines.vectorized import VectorizedEngine
from lightning_feddua.host.federation import Federation


@register_engine
class CompiledEngine(VectorizedEngine):
    """The vectorized engine with the local steps of a stack compiled into one function.

    It rounds differently, so that a run is resumed only by the one that it was begun with.

    Args:
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        states: what they keep between rounds.
        compile: has no effect here.
    """

    name = "compiled"

    def __init__(
        self, federation: Federation, algorithm: LocalTraining, states: ClientStates, compile: bool = True
    ) -> None:
        super().__init__(federation, algorithm, states, compile=True)
