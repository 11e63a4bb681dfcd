"""The paper's synthetic task: overparameterised linear regression on anisotropic inputs."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_feddua.checks import check_whole
from lightning_feddua.data.module import FederatedDataModule


class SyntheticRegression(FederatedDataModule):
    """Clients with ``x ~ N(0, diag(k^-decay))`` and noiseless targets ``y = ⟨W_i, x⟩``, ``W_i ~ N(u_i, 1)^d``.

    Each client's shift ``u_i ~ N(0, 0.1²)`` is one number. The task is to fit the training data, so validation uses the
    pooled training data, in one batch. All data is float64.

    Args:
        num_clients: the number of clients.
        samples_per_client: the number of samples per client.
        dim: the number of inputs d.
        decay: the exponent of the inputs' variances ``k^-decay``.
        per_sample: draw a new W for each sample, which is the literal reading of the paper.
        batch_size: the size of a local minibatch; None for all samples of the client.
        seed: the seed of the data, not of the run.
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
            check_whole(name, value, least=1)
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
