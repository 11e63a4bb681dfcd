"""What a dataset draws at random is the same in any number of worker processes, and on both engines."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_feddua import FedAvg, FederatedDataModule, MimeLite
from lightning_feddua.models import LinearRegression


class Noisy(Dataset):
    """Draws from all three global generators in `__getitem__`."""

    def __init__(self, client, size=11):
        self.client, self.size = client, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        x = torch.sin(torch.arange(4.0) * (i + 1) + self.client)
        x = x + 0.1 * torch.randn(4) + np.random.rand() * 0.1 + random.random() * 0.1
        return x, x.sum(dim=0, keepdim=True)


# The inputs of each step; what a module or its class keeps is its own for each client.
SEEN = []


class Recorded(LinearRegression):
    """With dropout."""

    def __init__(self, dropout=0.5):
        super().__init__(4)
        self.dropout = nn.Dropout(dropout)

    def training_step(self, batch, batch_idx):
        if not torch._C._functorch.is_batchedtensor(batch[0]):
            SEEN.append(batch[0].clone())
        x, y = batch
        return super().training_step([self.dropout(x), y], batch_idx)


def fit(make_loop, num_workers, dropout=0.5, sizes=(11, 11, 3), **arguments):
    torch.manual_seed(0)
    SEEN.clear()
    model = Recorded(dropout)
    data = FederatedDataModule(
        {str(i): Noisy(i, size) for i, size in enumerate(sizes)}, batch_size=5, num_workers=num_workers
    )
    make_loop(server=FedAvg(), **{"engine": "sequential", **arguments}).fit(model, data)
    return model.linear.weight.detach(), list(SEEN)


@pytest.mark.parametrize("work", [{"local_steps": 5}, {"local_epochs": 2}])
def test_any_number_of_workers_gives_the_same_bits(make_loop, work):
    weights, seen = fit(make_loop, 0, **work)
    for workers in (1, 2):
        others, seen_by_others = fit(make_loop, workers, **work)
        assert torch.equal(others, weights)
        assert all(map(torch.equal, seen, seen_by_others))
    # Samples are drawn anew each time.
    assert len({batch.sum().item() for batch in seen}) == len(seen)


@pytest.mark.parametrize("sizes", [(11, 11, 11), (11, 3, 3), (4, 4, 4)])
def test_both_engines_see_the_same_samples(make_loop, sizes):
    arguments = {"dropout": 0.0, "sizes": sizes, "precision": "64-true", "local_steps": 5}
    sequential, _ = fit(make_loop, 0, **arguments)
    for workers in (0, 2):
        vectorized, _ = fit(make_loop, workers, engine="vectorized", **arguments)
        torch.testing.assert_close(vectorized, sequential, rtol=1e-10, atol=1e-12)


def test_reading_a_sample_does_not_disturb_dropout(make_loop):
    """A dataset that draws nothing gives the same run as one that draws and throws away."""

    class Quiet(Noisy):
        def __getitem__(self, i):
            torch.rand(self.draws), np.random.rand(self.draws), random.random()
            x = torch.sin(torch.arange(4.0) * (i + 1) + self.client)
            return x, x.sum(dim=0, keepdim=True)

    results = []
    for draws in (0, 3):
        torch.manual_seed(0)
        Quiet.draws = draws
        model = Recorded()
        data = FederatedDataModule({str(i): Quiet(i) for i in range(3)}, batch_size=5)
        make_loop(server=FedAvg(), engine="sequential").fit(model, data)
        results.append(model.linear.weight.detach())
    assert torch.equal(*results)


def test_full_gradients_do_not_depend_on_workers(make_loop):
    results = [fit(make_loop, workers, client=MimeLite())[0] for workers in (0, 1)]
    assert torch.equal(*results)
