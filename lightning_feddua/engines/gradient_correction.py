"""The client algorithm's change of a gradient between the backward pass and the optimizer's step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_feddua.clients.local_training import LocalRound, LocalTraining
from lightning_feddua.engines.local_rounds import LocalRounds
from lightning_feddua.host.extra_gradients import ExtraGradients
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import random_state, set_random_state


class GradientCorrection:
    """Lets an algorithm change the gradients of the module in training, as one vector.

    Args:
        federation: the module and its clients.
        algorithm: what clients do.
        rounds: the algorithm's part of the steps.
    """

    def __init__(self, federation: Federation, algorithm: LocalTraining, rounds: LocalRounds) -> None:
        self._federation = federation
        self._rounds = rounds
        self._gradients = ExtraGradients(federation)
        self._at_anchor = algorithm.needs_anchor_gradient
        self._flat = torch.empty_like(federation.parameters.vector) if algorithm.corrects else None

    def start_batch(self, batch: Any, batch_idx: int) -> None:
        """Note the minibatch, and the random numbers that its training step is about to draw."""
        self._batch, self._batch_idx = batch, batch_idx
        if self._at_anchor:
            self._random_state = random_state(self._federation.fabric.device)

    def __call__(self, local: LocalRound) -> None:
        """Change the gradients; they become windows on one vector."""
        if self._flat is None:
            return
        flat, parameters = self._federation.parameters, self._federation.parameters.tensors
        if self._at_anchor:
            local.anchor_gradient = self._anchor_gradient(local.anchor)
        self._flat.zero_()
        windows = flat.gather([parameter.grad for parameter in parameters], self._flat)
        self._rounds.correct(self._flat, flat.vector, local)
        for parameter, window in zip(parameters, windows, strict=True):
            if parameter.grad is not None:
                parameter.grad = window

    def _anchor_gradient(self, anchor: Tensor) -> Tensor:
        """The gradient of the present minibatch at the global weights, with the same random numbers."""
        vector, device = self._federation.parameters.vector, self._federation.fabric.device
        weights, after = vector.clone(), random_state(device)
        vector.copy_(anchor)
        set_random_state(device, self._random_state)
        gradient = self._gradients.of_batch(self._batch, self._batch_idx)
        vector.copy_(weights)
        set_random_state(device, after)
        return gradient
