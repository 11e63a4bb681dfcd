"""Federated sparse regression: few of many inputs matter, and clients disagree on the rest."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.errors import ConfigurationError


class SparseRegression(FederatedDataModule):
    """Clients with ``y = ⟨w* + δ_i, x⟩ + noise``, where ``w*`` has few non-zeros, all of them ±1.

    Each client's own ``δ_i ~ N(0, disagreement²/dim)`` is dense, and the δ_i sum to zero: what clients have in common
    is ``w*``. Inputs are standard normal. Validation is on new samples of ``w*`` itself, in one batch. All in float64.

    Args:
        num_clients: the number of clients.
        samples_per_client: the number of samples of each.
        dim: the number of inputs d.
        nonzeros: the number of inputs that matter, drawn at random.
        disagreement: the norm of δ_i, roughly; that of ``w*`` is √nonzeros.
        noise: the standard deviation of the noise in the clients' targets.
        batch_size: the size of a local minibatch; None for all samples of a client.
        seed: of the data; not of the run.

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
            if count < 1:
                raise ConfigurationError(f"`{name}={count}` is less than 1.", "Give a whole number from 1 up.")
        if not 1 <= nonzeros <= dim:
            raise ConfigurationError(
                f"`nonzeros={nonzeros}` lies outside 1 to `dim={dim}`.", "Choose a number inside, a small one."
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
