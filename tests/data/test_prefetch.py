import os
from contextlib import nullcontext
from multiprocessing import active_children

import pytest
import torch
from torch.utils.data import Dataset

from lightning_feddua import ClientError, ConfigurationError, FedAvg, FederatedDataModule, FederatedLoop
from lightning_feddua.models import LinearRegression


class OnDisk(Dataset):
    """Samples that are computed when they are asked for, in a process that they name."""

    def __init__(self, client, noise=0.0, broken=False):
        self.client, self.noise, self.broken = client, noise, broken

    def __len__(self):
        return 7 + self.client

    def __getitem__(self, i):
        if self.broken and i == 2:
            raise OSError("the disk is gone")
        x = torch.sin(torch.arange(4.0) * (i + 1) + self.client)
        return x + self.noise * torch.randn(4), x.sum(dim=0, keepdim=True), os.getpid()


# What modules have seen; what they keep themselves is undone after each client.
PROCESSES = set()


class Recorded(LinearRegression):
    """Notes in which processes its samples were made."""

    def __init__(self):
        super().__init__(4)

    def training_step(self, batch, batch_idx):
        PROCESSES.update(batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)


def fit(tmp_path, num_workers, noise=0.0, broken=None, **arguments):
    torch.manual_seed(0)
    PROCESSES.clear()
    module = Recorded()
    clients = {str(i): OnDisk(i, noise, i == broken) for i in range(4)}
    loop = FederatedLoop(server=FedAvg(), max_rounds=3, clients_per_round=3, out_dir=tmp_path, accelerator="cpu",
                         engine="sequential", enable_progress_bar=False, **{"local_steps": 5, **arguments})  # fmt: skip
    loop.fit(module, FederatedDataModule(clients, batch_size=3, num_workers=num_workers))
    return module.linear.weight.detach(), set(PROCESSES)


@pytest.mark.parametrize("work", [{"local_steps": 5}, {"local_steps": None, "local_epochs": 2}])
def test_workers_prepare_the_same_minibatches_elsewhere(work, tmp_path):
    weights, processes = fit(tmp_path, 0, **work)
    prefetched, workers = fit(tmp_path, 2, **work)
    assert processes == {os.getpid()}
    # The same two for the whole run.
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert torch.equal(prefetched, weights)


@pytest.mark.parametrize("broken", [None, 3])
def test_workers_end_with_the_run(broken, tmp_path):
    before = set(active_children())
    with pytest.raises(ClientError) if broken else nullcontext():
        fit(tmp_path, 2, broken=broken)
    assert set(active_children()) <= before


def test_random_samples_do_not_depend_on_the_number_of_workers(tmp_path):
    one, _ = fit(tmp_path, 1, noise=1.0)
    two, _ = fit(tmp_path, 2, noise=1.0)
    assert torch.equal(one, two)


def test_an_error_in_a_worker_names_the_client(tmp_path):
    with pytest.raises(
        ClientError, match=r"(?s)Client `3` failed in round \d during the reading of its data: .*the disk is gone"
    ):
        fit(tmp_path, 1, broken=3)


def test_a_client_that_cannot_be_read_is_skipped_and_the_others_get_their_own_samples(tmp_path):
    with pytest.warns(UserWarning, match="the disk is gone"):
        weights, _ = fit(tmp_path, 0, broken=3, on_client_error="skip")
    with pytest.warns(UserWarning, match="the disk is gone"):
        prefetched, _ = fit(tmp_path, 1, broken=3, on_client_error="skip")
    assert torch.equal(prefetched, weights)


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ConfigurationError, match="num_workers=-1"):
        FederatedDataModule({"a": OnDisk(0)}, num_workers=-1)
