"""Clients trained by whole passes: each by Lightning's Trainer, and all of them by the loop."""

import copy

import torch
from lightning import Callback
from torch.utils.data import DataLoader, Sampler

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop
from lightning_feddua.randomness import Purpose, generator, seed_generators
from tests.trainers import quiet_trainer

CPU = torch.device("cpu")
BATCH = 8


class Passes(Sampler):
    """The order in which the loop reads a client's samples."""

    def __init__(self, size, client):
        self.size, self.rng = size, generator(0, 0, client, Purpose.MINIBATCHES)

    def __iter__(self):
        return iter(self.rng.permutation(self.size).tolist() if self.size > BATCH else range(self.size))

    def __len__(self):
        return self.size


class SeedAtStart(Callback):
    """Seeds as the loop does, after everything that Trainer draws before the first step."""

    def __init__(self, client):
        self.client = client

    def on_train_start(self, trainer, module):
        seed_generators(0, 0, self.client, Purpose.LOCAL_STEPS, CPU)


def trained_by_trainer(module, dataset, tmp_path, client=0, epochs=2, drop_last=False, **arguments):
    """A copy of the module after Trainer has trained it."""
    module = copy.deepcopy(module)
    loader = DataLoader(
        dataset, BATCH, sampler=Passes(len(dataset), client), drop_last=drop_last, generator=torch.Generator()
    )
    trainer = quiet_trainer(
        max_epochs=epochs,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[SeedAtStart(client)],
        default_root_dir=tmp_path,
        **arguments,
    )
    trainer.fit(module, loader)
    return module


class Keep(FederatedCallback):
    """Keeps the weights of each client."""

    def __init__(self):
        self.states = []

    def on_client_end(self, loop):
        self.states.append(copy.deepcopy(loop.module.state_dict()))


def trained_by_loop(module, datasets, tmp_path, epochs=2, drop_last=False, **arguments):
    """The clients' states after a round, with the module as the last of them has left it, and the loop."""
    keep = Keep()
    defaults = {"server": FedAvg(), "max_rounds": 1, "local_epochs": epochs, "engine": "sequential"}
    loop = FederatedLoop(
        **{**defaults, **arguments}, callbacks=[keep], accelerator="cpu", out_dir=tmp_path, enable_progress_bar=False
    )
    clients = {str(i): dataset for i, dataset in enumerate(datasets)}
    loop.fit(module, FederatedDataModule(clients, batch_size=BATCH, drop_last=drop_last))
    return keep.states, loop


def check_parity(module, datasets, tmp_path, **arguments):
    """Each client's weights and, where the module keeps them, events are those of its own Trainer."""
    start = copy.deepcopy(module)
    expected = [trained_by_trainer(start, data, tmp_path, i, **arguments) for i, data in enumerate(datasets)]
    states, _ = trained_by_loop(module, datasets, tmp_path, **arguments)
    for state, theirs in zip(states, expected, strict=True):
        for name, value in theirs.state_dict().items():
            assert torch.equal(state[name], value), name
        assert any(not torch.equal(state[name], value) for name, value in start.state_dict().items())
    return expected
