"""Faults of clients: data that cannot be read or has changed, updates that are not finite."""

import torch
from torch.utils.data import Dataset

from lightning_feddua import FederatedDataModule
from tests.drills.drill import SECONDS
from tests.forked_ranks import assert_same, unequal_clients


def changed_data(drill):
    drill.saved_run(2)
    client, shift = drill.draw.randrange(11), drill.draw.choice([0.01, -3.0])

    def changed():
        data = unequal_clients()
        data.clients[str(client)].tensors[0].add_(shift)
        return data

    ranks = drill.start(data=changed)
    assert set(ranks.wait(SECONDS)) == {1}
    assert f"the data of client `{client}` changed" in ranks.output(0)
    return "refused in a sentence"


class Unreadable(Dataset):
    """Samples of which some cannot be read, always or now and then."""

    def __init__(self, dataset, probability):
        self._dataset, self._probability = dataset, probability

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        if torch.rand(()) < self._probability:
            raise OSError("unreadable")
        return self._dataset[index]


def bad_clients(kind, names):
    def data():
        good = unequal_clients()
        clients = dict(good.clients)
        for name in names:
            if kind in ("nan", "inf"):
                clients[name].tensors[0][0, 0, 0, 0] = float(kind)
                clients[name].tensors[0][1:] = clients[name].tensors[0][0]
            else:
                clients[name] = Unreadable(clients[name], 1.0 if kind == "exception" else 0.05)
        return FederatedDataModule(clients, good.val_dataset, batch_size=10, eval_batch_size=16)

    return data


def skipped_clients(drill, kind):
    names = [str(i) for i in drill.draw.sample(range(11), 3 if kind != "random" else 11)]
    data = bad_clients(kind, names)
    ranks = drill.start(data=data, world_size=drill.draw.randint(2, 3), ckpt_path=None, on_client_error="skip")
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    found = torch.load(drill.out_dir / "result.pt", weights_only=True)
    assert all(value.isfinite().all() for value in found["state"].values())
    assert sum(row["skipped_clients"] for row in found["history"]) == sum(
        ranks.output(rank).count("is left out of round") for rank in range(len(ranks.pids))
    )
    alone = drill.start(data=data, world_size=1, ckpt_path=None, on_client_error="skip")
    assert not any(alone.wait(SECONDS)), alone.output(0)
    assert_same(torch.load(drill.out_dir / "result.pt", weights_only=True), found)
    return "left out, the same on all ranks"


def raised_clients(drill, kind):
    names = [str(i) for i in drill.draw.sample(range(11), 8)]
    ranks = drill.start(data=bad_clients(kind, names), world_size=drill.draw.randint(1, 3), ckpt_path=None)
    assert set(ranks.wait(SECONDS)) == {1}
    assert all("failed in round" in ranks.output(rank) for rank in range(len(ranks.pids)))
    return "named, on all ranks"


def nan_update(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "nan")


def inf_update(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "inf")


def exception_in_a_dataset(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "exception")


def failures_at_random(drill):
    return skipped_clients(drill, "random")
