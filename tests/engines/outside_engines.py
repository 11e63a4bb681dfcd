"""Engines as someone outside of the package would write them."""

import numpy as np
import torch

from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.engines import Engine, SequentialEngine


class Printing(SequentialEngine):
    """Prints each client, and trains it as usual."""

    def run(self, clients, state, events):
        for client, update in zip(clients, super().run(clients, state, events), strict=True):
            print(f"round {state.round}: {client.name}")
            yield update


class OneGradientStep(Engine):
    """One step of gradient descent on all of a client's data, by hand."""

    name = "one gradient step"
    lr = 0.1

    @classmethod
    def obstacle(cls, federation, algorithm):
        return "it has buffers" if list(federation.module.buffers()) else None

    def run(self, clients, state, events):
        parameters = self.federation.parameters
        for client in clients:
            parameters.load(state.weights)
            if events.start is not None:
                events.start(client)
            loss = self.federation.module.training_step(client.data.batch(np.arange(len(client.data))), 0)
            gradients = torch.autograd.grad(loss, parameters.tensors)
            delta = torch.cat([g.flatten() for g in gradients]).mul_(-self.lr)
            yield ClientUpdate(client, delta, {"loss": loss.detach()})


class Unfinished(Engine):
    name = "unfinished"


NOT_AN_ENGINE = 3
