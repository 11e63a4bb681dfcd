"""A checkpoint that cannot be trusted is not: damaged files, full disks, kills while saving, two runs at once."""

import os
import pickle
import resource
import signal
from functools import partial

import pytest
import torch

from lightning_feddua import ConfigurationError, FederatedCallback
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.files import DamagedError, read
from tests.checkpoints.checkpointed_runs import assert_same, fit, in_child, lines, make, rows


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read: No such file or directory. Give the checkpoint"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory. Give"),
        (lambda path: path.write_bytes(b"x" * 1000), "is damaged or no checkpoint at all. Give"),
        (lambda path: torch.save({"state_dict": {}}, path), "is not the checkpoint of a federated run. Give"),
    ],
)
def test_files_that_are_no_checkpoint(make_loop, tmp_path, make, message):
    make(tmp_path / "x.ckpt")
    with pytest.raises(ConfigurationError, match=message):
        fit(make_loop(), ckpt_path=tmp_path / "x.ckpt")
    assert not list(tmp_path.glob("version_*"))


class Malicious:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


def test_no_code_of_a_checkpoint_is_run(make_loop, tmp_path):
    loop = make_loop(max_rounds=1, checkpoint_every=1)
    fit(loop)
    path = loop.run_dir / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "callbacks": Malicious(tmp_path / "a")}, path)
    with pytest.raises(ConfigurationError, match="holds more than tensors and plain values, and loading it could run"):
        fit(make_loop(), ckpt_path="last")
    path.write_bytes(pickle.dumps(Malicious(tmp_path / "a")))
    with pytest.raises(DamagedError):
        read(path)
    assert not (tmp_path / "a").exists()
    # The file would have run it.
    pickle.loads(path.read_bytes())
    assert (tmp_path / "a").exists()


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[len(content) // 2 :]
    else:
        # Between two tensors are a few bytes that mean nothing.
        for place in range(len(content) // 2, len(content) // 2 + 200):
            content[place] ^= 4
    # It may be another name of the same file.
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_noticed_and_an_older_one_used(make_loop, tmp_path, how):
    whole = make_loop(out_dir=tmp_path / "whole")
    expected = fit(whole)
    loop = make_loop(max_rounds=3, callbacks=Checkpoint(save_top_k=-1))
    fit(loop)
    for name in ("last.ckpt", "round-0003.ckpt"):
        damage(loop.run_dir / name, how)
    with pytest.raises(ConfigurationError, match=r"last\.ckpt` is damaged"):
        fit(make_loop(), ckpt_path=loop.run_dir / "last.ckpt")
    resumed = make_loop(callbacks=Checkpoint(save_top_k=-1))
    with pytest.warns(UserWarning, match=r"last\.ckpt` is damaged.*Looking for an older one"):
        assert_same(fit(resumed, ckpt_path="last"), expected)
    assert rows(resumed) == rows(whole)
    for path in loop.run_dir.glob("*.ckpt"):
        damage(path, how)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ConfigurationError, match="Every checkpoint in"):
        fit(make_loop(), ckpt_path="last")


def test_every_flipped_bit_is_noticed_or_harmless(make_loop):
    """`torch.load` alone does not notice those in a tensor."""
    loop = make_loop(max_rounds=1, checkpoint_every=1)
    fit(loop)
    path = loop.run_dir / "last.ckpt"
    content = path.read_bytes()
    expected = read(path)
    noticed = 0
    for place in range(0, len(content), len(content) // 150):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found = read(path)
        except ConfigurationError:
            noticed += 1
            continue
        assert str(found) == str(expected), place
        for name, weights in expected["federated"]["weights"].items():
            assert torch.equal(found["federated"]["weights"][name], weights), place
    assert noticed > 50


@pytest.mark.parametrize("moment", ["writing", "before replace", "after replace", "second file", "after both"])
def test_killed_while_saving(make_loop, tmp_path, monkeypatch, moment):
    """kill -9 in the second checkpoint: the first or the second is there as a whole."""
    expected = fit(make_loop(out_dir=tmp_path / "whole"))

    def kill_in_the_second_round(name, call):
        original, calls = getattr(os, name), []

        def replacement(*args, **kwargs):
            calls.append(args)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, replacement)

    def killed():
        if moment == "writing":
            original = torch.save

            def save(checkpoint, file):
                if checkpoint["epoch"] == 2:
                    file.write(b"PK" * 1000)
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                original(checkpoint, file)

            torch.save = save
        else:
            # `run.json` and the CSV file come first. Each takes one replacement, and one `fsync` of itself and its
            # folder; `last.ckpt` is another name of the round's own file.
            name, call = {
                "before replace": ("replace", 5),
                "after replace": ("fsync", 9),
                "second file": ("replace", 6),
                "after both": ("fsync", 10),
            }[moment]
            kill_in_the_second_round(name, call)
        fit(make_loop(callbacks=Checkpoint(save_top_k=-1)))

    assert in_child(killed) == -signal.SIGKILL
    run_dir = tmp_path / "version_0"
    saved = read(run_dir / "last.ckpt")["epoch"]
    assert saved == (2 if moment == "after both" else 1)
    assert (run_dir / "round-0001.ckpt").exists()
    assert (run_dir / "round-0002.ckpt").exists() == (moment not in ("writing", "before replace"))
    assert (run_dir / ".unfinished.ckpt").exists() == (moment not in ("after replace", "after both"))
    resumed = make_loop(callbacks=Checkpoint(save_top_k=-1))
    assert_same(fit(resumed, ckpt_path="last"), expected)
    assert not (run_dir / ".unfinished.ckpt").exists()


def test_a_full_disk_does_not_end_the_run(make_loop, tmp_path):
    """The limit on the size of a file gives a real error of the operating system in the middle of a write."""

    class Fill(FederatedCallback):
        def on_round_start(self, round):
            limit = 3000 if round in (1, 2) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        def on_round_end(self, loop, round):
            # Too long for the limit.
            loop.history[-1].update({f"metric {i}": 0.123 for i in range(300 if round == 1 else 0)})

    loop = make_loop(max_rounds=4, callbacks=[Fill(), Checkpoint(save_top_k=-1)])
    with pytest.warns(UserWarning, match="File too large") as warnings:
        fit(loop)
    messages = [str(w.message) for w in warnings]
    assert (
        sum("After 2 rounds, `" in m and "last.ckpt` could not be saved: File too large." in m for m in messages) == 1
    )
    assert sum("`metrics.csv` cannot be written: File too large. The run continues." in m for m in messages) >= 1
    assert sorted(p.name for p in loop.run_dir.iterdir()) == sorted(
        ["last.ckpt", "metrics.csv", "round-0001.ckpt", "round-0004.ckpt", "run.json"]
    )
    assert [row["round"] for row in lines(loop.run_dir / "metrics.csv")] == ["0", "1", "2", "3"]
    assert read(loop.run_dir / "last.ckpt")["epoch"] == 4


@pytest.mark.parametrize("devices", [1, 2])
def test_what_could_not_be_saved_in_the_last_round_is_saved_at_the_end(make_loop, tmp_path, devices):
    class Fill(FederatedCallback):
        def on_round_start(self, round):
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (3000 if round == 3 else resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )

        def on_fit_end(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    assert in_child(lambda: fit(make_loop(checkpoint_every=1, callbacks=Fill(), **ranks))) == 0
    assert read(tmp_path / "version_0/last.ckpt")["epoch"] == 4


def test_a_folder_that_cannot_be_written(make_loop, monkeypatch):
    fit(make_loop(max_rounds=1, checkpoint_every=1))
    # Root may write anywhere, so the answer of a read-only file system is put in its place.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigurationError, match=r"version_0` cannot be written: Permission denied\. Give a writable"):
        fit(make_loop(), ckpt_path="last")


def test_two_runs_at_once(make_loop, tmp_path):
    """Each has its own folder, and nobody goes on with a run that is still alive."""

    class Meanwhile(FederatedCallback):
        def on_round_end(self, round):
            if round == 1:
                fit(make_loop(max_rounds=1, out_dir=tmp_path))
                (tmp_path / "version_1").rename(tmp_path / "other")
                with pytest.raises(ConfigurationError, match=r"version_0` is still being continued by another process"):
                    fit(make_loop(), ckpt_path="last")

    outer = make_loop(max_rounds=3, checkpoint_every=1, callbacks=Meanwhile())
    fit(outer)
    fit(make_loop(max_rounds=3), ckpt_path="last")
    assert [row["round"] for row in lines(tmp_path / "version_0/metrics.csv")] == ["0", "1", "2"]
    assert [row["round"] for row in lines(tmp_path / "other/metrics.csv")] == ["0"]
