"""A run that ends by an exception keeps the rounds before it."""

from functools import partial

import pytest
import torch
from torch.utils.data import Dataset

from lightning_feddua import (
    ClientError,
    FedAvg,
    FedDuAdam,
    FederatedCallback,
    FederatedDataModule,
    Scaffold,
    UpdateTransform,
)
from lightning_feddua.aggregation.simulation import Simulation
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.files import read
from tests.checkpoints.checkpointed_runs import Scheduled, assert_same, fit, make, rows
from tests.modules import Classifier, classification


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path / "runs", engine="sequential")


class OnDisk(Dataset):
    """A sample is read while a file is there."""

    def __init__(self, data, path):
        self.data, self.path = data, path

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.path.read_text()
        return self.data[index]


class Removes(FederatedCallback):
    """Takes the file away when a round begins."""

    def __init__(self, path, round=2):
        self.path, self.round = path, round

    def on_round_start(self, loop, round):
        if round == self.round and loop.fabric.is_global_zero:
            self.path.unlink()
        loop.fabric.barrier()


def on_disk(path):
    path.write_text("")
    datasets = {name: OnDisk(classification(20 + 7 * i, seed=i), path) for i, name in enumerate("abcd")}
    return FederatedDataModule(datasets, classification(30, seed=9), batch_size=16)


class Counts(Scheduled):
    """Counts its training steps in Python, and in its checkpoints."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count


def counts():
    torch.manual_seed(3)
    return Counts()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
def test_the_rounds_before_a_failure_are_saved_and_resumed(make_loop, tmp_path, server, devices, caplog):
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    path = tmp_path / "data"
    whole = make_loop(server=server(), out_dir=tmp_path / "whole", **ranks)
    expected = fit(whole, counts(), on_disk(path))
    failing = make_loop(server=server(), callbacks=Removes(path), **ranks)
    with caplog.at_level("INFO"), pytest.raises(Exception, match="No such file"):
        fit(failing, counts(), on_disk(path))
    saved = tmp_path / "runs/version_0/last.ckpt"
    assert read(saved)["epoch"] == 2
    assert read(saved)["count"] == 0
    if devices == 1:
        assert "The run has failed and is saved after round 2. Resume with `loop.fit(" in caplog.text
    resumed = make_loop(server=server(), **ranks)
    assert_same(fit(resumed, Counts(), on_disk(path), ckpt_path=saved), expected)
    assert rows(resumed) == rows(whole)


class Fails(FederatedCallback):
    """Raises in a hook, in the third round."""

    def __init__(self, hook):
        setattr(type(self), hook, lambda self, loop: self.fail(loop))

    def fail(self, loop):
        if loop.current_round == 2:
            raise RuntimeError("by and by")


@pytest.mark.parametrize(
    ("hook", "rounds"),
    [
        ("on_round_start", 2),
        ("on_client_end", 2),
        ("on_aggregate_end", None),
        ("on_validation_end", None),
        ("on_round_end", None),
        ("on_fit_end", 3),
    ],
)
def test_a_round_is_saved_only_where_its_state_is_still_there(make_loop, tmp_path, hook, rounds):
    with pytest.raises((RuntimeError, ClientError), match="by and by"):
        fit(make_loop(max_rounds=3, callbacks=type("Fails", (Fails,), {})(hook)))
    saved = list(tmp_path.glob("runs/*/last.ckpt"))
    assert [read(path)["epoch"] for path in saved] == ([] if rounds is None else [rounds])


class Remembers(Removes):
    seen = -1

    def on_round_start(self, loop, round):
        self.seen = round
        super().on_round_start(loop, round)

    def state_dict(self):
        return {"seen": self.seen}


class Plain(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Feedback(UpdateTransform):
    def state_dict(self):
        return {"residual": torch.zeros(2)}


@pytest.mark.parametrize(
    "arguments",
    [
        {"client": Scaffold(), "server": FedAvg()},
        {"transforms": [Feedback()]},
        {"callbacks": Remembers},
        {"backend": type("Other", (Simulation,), {"failed_together": False})(), "devices": 2},
        {"enable_checkpointing": False},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_not_where_a_failed_round_has_left_something(make_loop, tmp_path, arguments):
    path = tmp_path / "data"
    if arguments.get("devices") == 2:
        arguments = {**arguments, "strategy": "ddp_fork"}
    loop = make_loop(**{**arguments, "callbacks": arguments.get("callbacks", Removes)(path)})
    with pytest.raises(Exception, match="No such file"):
        fit(loop, Plain(), on_disk(path))
    assert not list(tmp_path.glob("runs/*/last.ckpt"))


def test_what_was_saved_before_is_replaced(make_loop, tmp_path, caplog):
    """And not written again where it is as new."""
    path = tmp_path / "data"
    for every, fails in ((2, 3), (1, 3)):
        loop = make_loop(callbacks=[Checkpoint(every), Removes(path, fails)])
        with caplog.at_level("INFO"), pytest.raises(ClientError):
            fit(loop, data=on_disk(path))
        assert read(loop.run_dir / "last.ckpt")["epoch"] == 3
    assert caplog.text.count("saved after round 3.") == 2
