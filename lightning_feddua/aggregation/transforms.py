"""What changes updates on their way to the server: clipping, noise, compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_feddua.aggregation.update import ClientUpdate, RoundUpdate
from lightning_feddua.checks import check_positive
from lightning_feddua.randomness import Purpose
from lightning_feddua.vectors import squared_norm


@dataclass(frozen=True)
class TransformContext:
    """What a transform knows of the round.

    Args:
        seed: the run's seed.
        round: the round, from 0.
        cohort_size: how many clients were drawn for the round.
        population: how many clients there are.
        place: the transform's place among all; two of one class draw different numbers.
    """

    seed: int
    round: int
    cohort_size: int
    population: int
    place: int = 0

    def generator(self, client: int | None = None) -> torch.Generator:
        """A generator on the CPU whose numbers depend on seed, round, client and transform, and not on the rank.

        Args:
            client: the client's place in the data module; None for what concerns the round.
        """
        words = [Purpose.TRANSFORM, self.seed, self.round, 0 if client is None else client + 1, self.place]
        high, low = np.random.SeedSequence(words).generate_state(2)
        return torch.Generator().manual_seed(int(high) << 32 | int(low))


class UpdateTransform:
    """Changes updates, in place: each client's before the sum, the round's after it.

    Every rank calls :meth:`client` for its own clients and :meth:`round` with the same update. Random numbers come from
    the context, so that the number of ranks does not change them. Attributes that do not begin with an underscore must
    stay the same when a run is resumed. A state, if any, is changed in :meth:`round` alone: what :meth:`client` sees
    depends on the rank.

    Example:
        >>> class Noise(UpdateTransform):
        ...     def __init__(self, std):
        ...         self.std = std
        ...
        ...     def round(self, update, context):
        ...         noise = torch.randn(update.mean_delta.shape, generator=context.generator())
        ...         update.mean_delta.add_(noise.to(update.mean_delta), alpha=self.std)
    """

    def reset(self) -> None:
        """Start a fit: forget all rounds."""

    def client(self, update: ClientUpdate, context: TransformContext) -> None:
        """Change one client's update, on the rank that trained it. Its norm is taken afterwards.

        An exception here counts as the client's failure.
        """

    def round(self, update: RoundUpdate, context: TransformContext) -> None:
        """Change the update of the round, on every rank alike, before callbacks and the server see it."""

    def state_dict(self) -> dict[str, Any]:
        """What later rounds depend on, as tensors and plain values, for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""


class ClipUpdateNorm(UpdateTransform):
    """Clips each client's update at a norm; the loop's ``max_update_norm``.

    Args:
        max_norm: the largest norm.
    """

    def __init__(self, max_norm: float) -> None:
        check_positive("max_norm", max_norm)
        self.max_norm = max_norm

    def client(self, update: ClientUpdate, context: TransformContext) -> None:
        """``Δ_i · min(1, max_norm / ‖Δ_i‖)``."""
        norm = squared_norm(update.delta).sqrt()
        update.delta.mul_((self.max_norm / norm).clamp(max=1.0).to(update.delta.dtype))


class TransformChain:
    """All transforms of a run, in order.

    Args:
        transforms: the transforms.
        seed: the run's seed.
        population: how many clients there are.
    """

    def __init__(self, transforms: Sequence[UpdateTransform], seed: int, population: int) -> None:
        self._seed = seed
        self._population = population
        # Those that change clients' updates, with their places among all.
        self.of_clients = _overriding("client", transforms)
        self._of_rounds = _overriding("round", transforms)

    def client(self, update: ClientUpdate, round: int, cohort_size: int) -> None:
        """Change one client's update."""
        for place, transform in self.of_clients:
            transform.client(update, TransformContext(self._seed, round, cohort_size, self._population, place))

    def round(self, update: RoundUpdate, round: int, cohort_size: int) -> None:
        """Change the round's update."""
        for place, transform in self._of_rounds:
            transform.round(update, TransformContext(self._seed, round, cohort_size, self._population, place))


def _overriding(name: str, transforms: Sequence[UpdateTransform]) -> list[tuple[int, UpdateTransform]]:
    """The transforms that define a method, with their places among all."""
    base = getattr(UpdateTransform, name)
    return [(place, one) for place, one in enumerate(transforms) if getattr(type(one), name) is not base]
