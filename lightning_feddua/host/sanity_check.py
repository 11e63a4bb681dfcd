"""A few batches of validation before the first round, so that errors show before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_feddua.randomness import preserved_random_state

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation


def sanity_check(federation: Federation, steps: int, weights: Tensor) -> None:
    """Validate a few batches; nothing of it remains. A collective.

    Args:
        federation: the module and its validation data.
        steps: how many batches; -1 for all.
        weights: the global weights.
    """
    if steps == 0:
        return
    view, evaluator = federation.view, federation.evaluator
    view.sanity_checking, evaluator.most = True, None if steps == -1 else steps
    try:
        with preserved_random_state(federation.fabric.device), federation.hidden_state.undone():
            federation.evaluate("validation")
    finally:
        view.sanity_checking, evaluator.most = False, None
        federation.restore(weights)
