"""Gradients beside those of local steps: of a minibatch, or of all of a client's data, at the weights in the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_feddua.data.streams import ClientStream
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.log_capture import LogCapture
from lightning_feddua.host.training_step import TrainingStep
from lightning_feddua.randomness import Purpose, seed_generators

if TYPE_CHECKING:
    from lightning_feddua.engines.base import Client, GlobalState


class ExtraGradients:
    """Runs training steps that leave no trace: nothing is logged, and buffers and gradients stay as they are.

    Args:
        federation: the module and its clients.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._step = TrainingStep(federation.module)
        self._capture = LogCapture(federation.fabric.device)

    def of_client(self, client: Client, state: GlobalState) -> Tensor:
        """``∇F_i(w_t)``: the mean over all of a client's samples, minibatch by minibatch. Loads the global weights."""
        with self._federation.hidden_state.undone():
            try:
                return self._of_client(client, state)
            finally:
                self._federation.view.stop_client()

    def _of_client(self, client: Client, state: GlobalState) -> Tensor:
        federation = self._federation
        if isinstance(client.data, ClientStream):
            raise ConfigurationError(
                f"The algorithm needs the gradient over all samples of client `{client.name}`, which is a DataLoader or"
                " a stream.",
                "Give the client a map-style dataset, or choose another `client` algorithm.",
            )
        federation.restore(state.weights)
        seed_generators(state.seed, state.round, client.index, Purpose.LOCAL_STEPS, federation.fabric.device)
        view, size = federation.view, len(client.data)
        view.in_client = True
        view.start_client(state.work, size)
        view.client_data = client.data
        total = torch.zeros_like(state.weights)
        with federation.world_of_one.entered():
            for start in range(0, size, state.work.batch_size):
                positions = np.arange(start, min(size, start + state.work.batch_size))
                batch = federation.transfer(client.data.batch(positions))
                total.add_(self.of_batch(batch, start // state.work.batch_size), alpha=len(positions) / size)
        return total

    def of_batch(self, batch: Any, batch_idx: int) -> Tensor:
        """The gradient of one minibatch at the weights in the module; zero for parameters that the step leaves out."""
        federation = self._federation
        buffers = [(buffer, buffer.clone()) for buffer in federation.module.buffers()]
        self._capture.start()
        self._capture.start_batch(batch)
        with self._capture.attached(federation.module), federation.fabric.strategy.precision.forward_context():
            loss = self._step(batch, batch_idx)
        parameters = [parameter for _, parameter in federation.parameters.named(federation.module)]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        flat = torch.zeros_like(federation.parameters.vector)
        federation.parameters.gather(gradients, flat)
        return flat
