"""Faults of clients: data that cannot be read, hangs or has changed, updates that are not finite."""

from collections.abc import Mapping

import torch
from torch.utils.data import Dataset

from lightning_feddua import FederatedDataModule, UpdateTransform
from lightning_feddua.checkpoints.files import read
from tests.aggregation.test_hanging_clients import Reads, hang, kill
from tests.drills.drill import ROUNDS, SECONDS
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


class Lazy(Mapping):
    """Clients whose data is made when it is asked for, and cannot be made for some."""

    def __init__(self, clients, names):
        self._clients, self._names = clients, names

    def __getitem__(self, name):
        if name in self._names:
            raise OSError("no such file")
        return self._clients[name]

    def __iter__(self):
        return iter(self._clients)

    def __len__(self):
        return len(self._clients)


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
        if kind == "lazy":
            clients = Lazy(clients, names)
        for name in names if kind != "lazy" else ():
            if kind in ("nan", "inf"):
                clients[name].tensors[0][0, 0, 0, 0] = float(kind)
                clients[name].tensors[0][1:] = clients[name].tensors[0][0]
            elif kind == "1e25":
                clients[name].tensors[0][0, 0, 0, 0] = 1e25
            else:
                clients[name] = Unreadable(clients[name], 1.0 if kind == "exception" else 0.05)
        return FederatedDataModule(clients, good.val_dataset, batch_size=10, eval_batch_size=16)

    return data


def skipped_clients(drill, kind):
    # A single sample is drawn for sure where a client is small.
    known = range(4 if kind == "1e25" else 11)
    names = [str(i) for i in drill.draw.sample(known, 11 if kind == "random" else 3)]
    data = bad_clients(kind, names)
    ranks = drill.start(data=data, world_size=drill.draw.randint(2, 3), ckpt_path=None, on_client_error="skip")
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    found = drill.result()
    assert all(value.isfinite().all() for value in found["state"].values())
    skipped = sum(row["skipped_clients"] for row in found["history"])
    assert skipped or kind == "random"
    assert skipped == sum(ranks.output(rank).count("is left out of round") for rank in range(len(ranks.pids)))
    alone = drill.start(data=data, world_size=1, ckpt_path=None, on_client_error="skip")
    assert not any(alone.wait(SECONDS)), alone.output(0)
    assert_same(drill.result(), found)
    return "left out, the same on all ranks"


def raised_clients(drill, kind):
    names = [str(i) for i in (drill.draw.sample(range(11), 8) if kind != "1e25" else range(4))]
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


def sample_of_1e25(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "1e25")


def lazily_made_data_that_raises(drill):
    return drill.draw.choice([skipped_clients, raised_clients])(drill, "lazy")


class Huge(UpdateTransform):
    """Makes all updates of a round so large that each is finite, and their sum is not."""

    def __init__(self, at):
        self.at = at

    def client(self, update, context):
        if context.round == self.at:
            update.delta.fill_(0.9 * torch.finfo(torch.float32).max)


def sum_that_overflows(drill):
    round, action = drill.draw.randrange(ROUNDS), drill.draw.choice(["raise", "skip"])
    ranks = drill.fail(transforms=[Huge(round)], client=None, on_client_error=action)
    outputs = [ranks.output(rank) for rank in range(len(ranks.pids))]
    assert set(ranks.codes) == {1}
    assert all("The sum of the clients' updates in round" in output for output in outputs), outputs
    files = list(drill.out_dir.glob("version_*/last.ckpt"))
    assert [read(path)["epoch"] for path in files] == [round] * (round > 0)
    return "named on all ranks, nothing of the round is saved"


def stuck_data(drill, action, times, **more):
    # One that is read whole in each of its rounds.
    name = drill.draw.choice(["2", "3"])

    def data():
        good = unequal_clients()
        clients = {**good.clients, name: Reads(good.clients[name], action, times, drill.folder / "mark")}
        workers = 2 if action is kill else drill.draw.choice([0, 2])
        return FederatedDataModule(clients, good.val_dataset, batch_size=10, eval_batch_size=16, num_workers=workers)

    return name, drill.start(data=data, world_size=drill.draw.randint(1, 2), ckpt_path=None, **more)


def data_worker_killed(drill):
    limit = drill.draw.choice([None, 30.0])
    _, ranks = stuck_data(drill, kill, 1, client_timeout=limit)
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    assert any("is tried once more" in ranks.output(rank) for rank in range(len(ranks.pids)))
    assert_same(drill.result(), drill.expected)
    return "tried once more; the same bits"


def data_that_hangs_once(drill):
    _, ranks = stuck_data(drill, hang, 1, client_timeout=2.0)
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    assert any("is tried once more: it has taken longer" in ranks.output(rank) for rank in range(len(ranks.pids)))
    assert_same(drill.result(), drill.expected)
    return "tried once more; the same bits"


def data_that_hangs_for_ever(drill):
    action = drill.draw.choice(["raise", "skip"])
    name, ranks = stuck_data(drill, hang, 100, client_timeout=1.0, on_client_error=action)
    codes = ranks.wait(2 * SECONDS)
    outputs = [ranks.output(rank) for rank in range(len(ranks.pids))]
    if action == "skip":
        assert not any(codes), outputs
        assert any(f"Client `{name}` is left out of round" in output for output in outputs), outputs
        return "left out, named"
    assert set(codes) == {1}, outputs
    assert all(f"Client `{name}` failed in round" in output for output in outputs), outputs
    return "named, on all ranks"
