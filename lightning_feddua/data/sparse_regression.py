"""Federated sparse regression: only a few of many inputs matter, and clients disagree on the others."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_feddua.checks import check_whole
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.errors import ConfigurationError


class SparseRegression(FederatedDataModule):
    """Clients with ``y = ⟨w* + δ_i, x⟩ + noise``, where ``w*`` has a few non-zero entries, each ±1.

    Each client's ``δ_i ~ N(0, disagreement²/dim)`` is dense, and all δ_i sum to zero: the clients have ``w*`` in
    common. Inputs are standard normal. Validation uses new samples of ``w*`` itself, in one batch. All data is float64.

    Args:
        num_clients: the number of clients.
        samples_per_client: the number of samples per client.
        dim: the number of inputs d.
        nonzeros: the number of inputs that matter, chosen at random.
        disagreement: the approximate norm of δ_i; that of ``w*`` is √nonzeros.
        noise: the standard deviation of the noise in the clients' targets.
        batch_size: the size of a local minibatch; None for all samples of the client.
        seed: the seed of the data, not of the run.

    Attributes:
        true_weights: ``w*``.
    """

    def __init__(
        self,
        num_clients: int = 50,
        samples_per_client: int = 6,
        dim: int = 400,
        nonzeros: int = 10,
        disagreement: float = 0.7,
        noise: float = 0.1,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        counts = {"num_clients": num_clients, "samples_per_client": samples_per_client, "dim": dim}
        for name, count in counts.items():
            check_whole(name, count, least=1)
        if not 1 <= nonzeros <= dim:
            raise ConfigurationError(
                f"`nonzeros={nonzeros}` lies outside 1 to `dim={dim}`.", "Choose a small number in this range."
            )
        rng = np.random.default_rng(seed)
        w = np.zeros(dim)
        w[rng.choice(dim, nonzeros, replace=False)] = rng.choice([-1.0, 1.0], nonzeros)
        delta = rng.standard_normal((num_clients, dim)) * (disagreement / dim**0.5)
        delta -= delta.mean(axis=0)

        def samples(count: int, weights: np.ndarray, noise: float) -> TensorDataset:
            x = rng.standard_normal((count, dim))
            y = x @ weights + noise * rng.standard_normal(count)
            return TensorDataset(torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1))

        clients = {str(i): samples(samples_per_client, w + delta[i], noise) for i in range(num_clients)}
        val = samples(1000, w, 0.0)
        super().__init__(clients, val, batch_size=batch_size or samples_per_client, eval_batch_size=len(val))
        self.true_weights: Tensor = torch.from_numpy(w)
