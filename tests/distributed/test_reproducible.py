"""A reproducible run gives the same bits in one process with all cores and on ranks of one thread each."""

import pytest
import torch
from torch import nn

from lightning_feddua import FedDuAdam, FederatedDataModule
from tests.forked_ranks import ForkedRanks, assert_same, fit
from tests.modules import DropoutCNN, images


class Wide(DropoutCNN):
    """Large enough for torch to share the work among threads, which then add in another order."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers)


def convolutions():
    return Wide(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 64), nn.ReLU(), nn.Linear(64, 3))


def batch_norm():
    return Wide(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 3))


def layer_norm():
    return Wide(nn.Flatten(), nn.Linear(64, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 3))


def clients():
    data = {str(i): images(150 + 30 * i, seed=i) for i in range(4)}
    return FederatedDataModule(data, images(60, seed=9), batch_size=128)


def result(folder, model, world_size, threads, **arguments):
    folder.mkdir()

    def rank():
        torch.set_num_threads(threads)
        settings = {"server": FedDuAdam(), "local_steps": 4, "max_rounds": 3, "clients_per_round": None, **arguments}
        fit(folder, model, settings, data=clients)

    ranks = ForkedRanks(rank, world_size, folder)
    assert ranks.wait(60) == [0] * world_size, ranks.output(0)
    return torch.load(folder / "result.pt", weights_only=True)


_SLOW = [pytest.param(model, marks=pytest.mark.slow) for model in (convolutions, layer_norm)]


@pytest.mark.parametrize("model", [batch_norm, *_SLOW])
def test_neither_threads_nor_ranks_change_a_bit(tmp_path, model):
    reproducible = {"reproducible": True, "engine": "auto"}
    expected = result(tmp_path / "all cores", model, 1, 2, **reproducible)
    assert_same(result(tmp_path / "ranks", model, 2, 1, **reproducible), expected)


@pytest.mark.slow
def test_without_it_threads_do(tmp_path):
    one, two = (result(tmp_path / str(threads), convolutions, 1, threads)["state"] for threads in (1, 2))
    assert not all(torch.equal(one[name], two[name]) for name in one)
