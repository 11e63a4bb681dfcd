"""The paper's synthetic task: overparameterised linear regression on anisotropic inputs."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.errors import ConfigurationError


class SyntheticRegression(FederatedDataModule):
    """Clients with ``x ~ N(0, diag(k^-decay))`` and noiseless targets ``y = ⟨W_i, x⟩``, ``W_i ~ N(u_i, 1)^d``.

    Each client's shift ``u_i ~ N(0, 0.1²)`` is one number. Validation is on the pooled training data, in one batch: the
    task is to fit it. All in float64.

    Args:
        num_clients: the number of clients.
        samples_per_client: the number of samples of each.
        dim: the number of inputs d.
        decay: how fast the variance of the k-th input falls, as ``k^-decay``.
        per_sample: draw W for each sample anew, which is the literal reading of the paper.
        batch_size: the size of a local minibatch; None for all samples of a client.
        seed: of the data; not of the run.
    """

    def __init__(
        self,
        num_clients: int = 20,
        samples_per_client: int = 30,
        dim: int = 1000,
        decay: float = 1.1,
        per_sample: bool = False,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("num_clients", num_clients), ("samples_per_client", samples_per_client), ("dim", dim)):
            if value < 1:
                raise ConfigurationError(f"`{name}={value}` is less than 1.", "Give a whole number from 1 up.")
        rng = np.random.default_rng(seed)
        scale = np.arange(1, dim + 1) ** (-decay / 2)
        clients = {}
        for i in range(num_clients):
            x = rng.standard_normal((samples_per_client, dim)) * scale
            shift = 0.1 * rng.standard_normal()
            w = shift + rng.standard_normal((samples_per_client, dim) if per_sample else dim)
            y = (x * w).sum(axis=1, keepdims=True)
            clients[str(i)] = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        pooled = TensorDataset(*(torch.cat(t) for t in zip(*(c.tensors for c in clients.values()), strict=True)))
        super().__init__(clients, pooled, batch_size=batch_size or samples_per_client, eval_batch_size=len(pooled))
