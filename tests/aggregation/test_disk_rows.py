"""What clients keep on disk: full disks, kills, open files, and what checkpoints have of it."""

import os
import resource
import signal
import tempfile

import pytest
import torch
from lightning.fabric import Fabric

from lightning_feddua import ConfigurationError, FederatedCallback, Scaffold
from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.disk_rows import DiskRows
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.files import read
from lightning_feddua.errors import RankError
from tests.checkpoints.checkpointed_runs import assert_same, clients, in_child, make
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier


class Plain(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(loop, ckpt_path=None):
    torch.manual_seed(3)
    model = Plain()
    loop.fit(model, clients(), ckpt_path)
    return model


def make_loop(folder, keep="disk", **arguments):
    return make(client=Scaffold(), client_states=keep, engine="sequential", out_dir=folder, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_a_dictionary(dtype):
    rows, known = DiskRows((2, 3), dtype), {}
    for step in range(300):
        key = step * 7 % 11
        if step % 5 == 4:
            assert (rows.pop(key, None) is None) == (known.pop(key, None) is None)
        else:
            known[key] = torch.randn(2, 3).to(dtype)
            rows[key] = known[key]
        assert {*rows} == {*known}
        assert all(torch.equal(rows[key], row) for key, row in known.items())
    assert all(torch.equal(row, known[key]) for key, row in rows.mapped().items())
    # Places that were given up are used again.
    assert os.fstat(rows._file.fileno()).st_size <= 11 * 6 * dtype.itemsize


def test_rows_that_are_gone_and_rows_that_could_not_be_written():
    rows = DiskRows((1, 4), torch.float32)
    rows[0] = rows[1] = torch.ones(1, 4)
    del rows[0]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigurationError, match="cannot be written"):
            rows[2] = torch.ones(1, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*rows] == [1]
    # The place that was free still is.
    rows[2] = torch.full((1, 4), 2.0)
    assert os.fstat(rows._file.fileno()).st_size == 32
    os.ftruncate(rows._file.fileno(), 20)
    assert torch.equal(rows[2], torch.full((1, 4), 2.0))
    with pytest.raises(ConfigurationError, match="no longer whole"):
        rows[1]


def test_open_files_do_not_grow_with_the_clients():
    states = ClientStates(Fabric(accelerator="cpu", devices=1), ("a",), 10, torch.float32, "disk")
    before = len(os.listdir("/proc/self/fd"))
    for client in range(5000):
        states.put(client, torch.full((1, 10), float(client)))
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert "client_states_" not in maps.read()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_ends_the_run_with_a_message(tmp_path, world_size):
    """The limit on the size of a file gives a real error of the operating system."""

    class Fill(FederatedCallback):
        def on_round_start(self, loop, round):
            if round == 1 and loop.fabric.is_global_zero:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    def run():
        loop = make_loop(tmp_path, callbacks=Fill(), enable_checkpointing=False, devices="auto")
        # Others are told by it, or notice that it is gone.
        kind = RankError if loop.fabric.global_rank else ConfigurationError
        message = "What clients keep cannot be written to `.*`: File too large"
        with pytest.raises((kind, ConfigurationError), match="Rank 0|What" if loop.fabric.global_rank else message):
            fit(loop)

    ranks = ForkedRanks(run, world_size, tmp_path)
    assert not any(ranks.wait()), ranks.output(0) + ranks.output(world_size - 1)


def test_nothing_is_left_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    class Kill(FederatedCallback):
        def on_round_end(self, loop, round):
            assert len(loop.states)
            if round == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: fit(make_loop(tmp_path, callbacks=Kill()))) == -signal.SIGKILL
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_has_the_rows_that_there_are(tmp_path, devices):
    """And a run with them on disk is resumed to the same bits as one with them in memory."""
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    expected = fit(make_loop(tmp_path / "memory", "memory", **ranks))
    sizes = {}
    for keep in ("memory", "disk"):
        loop = make_loop(tmp_path / keep, keep, max_rounds=2, callbacks=Checkpoint(), **ranks)
        fit(loop)
        sizes[keep] = (loop.run_dir / "last.ckpt").stat().st_size
        rows = read(loop.run_dir / "last.ckpt")["federated"]["parts"]["client states"]["rows"]
        assert {*rows} <= set(range(4))
        assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows.values())
    assert abs(sizes["disk"] - sizes["memory"]) < 0.05 * sizes["memory"]
    assert_same(fit(make_loop(tmp_path / "disk", **ranks), "last"), expected)
