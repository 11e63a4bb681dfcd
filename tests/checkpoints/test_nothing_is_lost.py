"""Finished rounds stay: through kills between two files, full disks, and other jobs on the same folder."""

import os
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from lightning_feddua import ConfigurationError, FederatedCallback
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.files import read
from lightning_feddua.errors import UnsavedError
from lightning_feddua.launch.run_folders import newest_version
from tests.callbacks.test_early_stopping import Scores
from tests.checkpoints.checkpointed_runs import Scheduled, assert_same, clients, fit, in_child, lines, make, rows
from tests.forked_ranks import ForkedRanks


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path, engine="sequential")


def test_a_job_that_waits_keeps_the_folder_that_it_has_read(make_loop, tmp_path):
    """Otherwise another one could finish the run meanwhile, and this one would take it back to what it has read."""
    expected = fit(make_loop(out_dir=tmp_path / "whole"))
    fit(make_loop(max_rounds=2, checkpoint_every=1))

    def other():
        with pytest.raises(ConfigurationError, match="is still being continued by another process"):
            fit(make_loop(checkpoint_every=1), ckpt_path="last")

    class Slow(Scheduled):
        def configure_model(self):
            assert in_child(other) == 0

    assert_same(fit(make_loop(checkpoint_every=1), Slow(), ckpt_path="last"), expected)


SCORES = [3.0, 1.0, 2.0, 0.5, 4.0]


def checkpoints(kind):
    best = Checkpoint(monitor="score", mode="min", save_last=kind != "rarely")
    return [best, *([Checkpoint(every=3)] if kind == "rarely" else [])]


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        # The first ones write `run.json` and the start of `metrics.csv`.
        ("each round", (20, 21, 27, 30)),
        ("rarely", (15, 21)),
        pytest.param("each round", range(9, 63), marks=pytest.mark.slow),
        pytest.param("rarely", range(9, 63), marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_call_keeps_the_best_round(make_loop, tmp_path, kind, calls):
    """At each call that changes the folder; the checkpoint never names a file that is not there."""
    whole = checkpoints(kind)
    expected = fit(make_loop(max_rounds=5, callbacks=[*whole, Scores(SCORES)], out_dir=tmp_path / "whole"))
    assert Path(whole[0].best_model_path).name == "round-0004.ckpt"
    for call in calls:
        folder = tmp_path / str(call)

        def killed(call=call, folder=folder):
            calls = []

            def counted(original, *args, **kwargs):
                calls.append(original)
                if len(calls) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            for name in ("replace", "link", "unlink", "fsync"):
                setattr(os, name, partial(counted, getattr(os, name)))
            fit(make_loop(max_rounds=5, callbacks=[*checkpoints(kind), Scores(SCORES)], out_dir=folder))

        ended = in_child(killed)
        run_dir = folder / "version_0"
        best = min(SCORES[: len(list(lines(run_dir / "metrics.csv")))])
        kept = [int(path.stem[6:10]) - 1 for path in run_dir.glob("round-*.ckpt")]
        if (run_dir / "last.ckpt").exists():
            parts = read(run_dir / "last.ckpt")["federated"]["parts"]
            named = {name for state in parts.values() for name in (state or {}).get("scores", {})}
            assert named <= {path.name for path in run_dir.iterdir()}, call
        # The round whose files were being written is run again.
        assert best in (SCORES[i] for i in kept) or best == SCORES[len(lines(run_dir / "metrics.csv")) - 1], call
        resumed = checkpoints(kind)
        model = fit(make_loop(max_rounds=5, callbacks=[*resumed, Scores(SCORES)], out_dir=folder), ckpt_path="last")
        assert_same(model, expected)
        assert Path(resumed[0].best_model_path).name == "round-0004.ckpt", call
        assert Path(resumed[0].best_model_path).exists(), call
        if ended == 0:
            break
    assert isinstance(calls, tuple) or ended == 0


def test_a_round_and_the_last_are_one_file_where_they_are_the_same(make_loop):
    loop = make_loop(max_rounds=2, callbacks=Checkpoint(save_top_k=-1))
    fit(loop)
    assert (loop.run_dir / "last.ckpt").samefile(loop.run_dir / "round-0002.ckpt")
    assert read(loop.run_dir / "round-0001.ckpt")["epoch"] == 1


class Fill(FederatedCallback):
    """A disk that is full from a round on, as the operating system says in the middle of a write."""

    def __init__(self, first):
        self.first = first

    def on_round_start(self, round):
        if round >= self.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_a_run_that_could_not_be_saved_does_not_end_well(make_loop, tmp_path, world_size, monitor):
    def run():
        loop = make_loop(callbacks=[Checkpoint(monitor=monitor), Fill(2)], devices="auto")
        with pytest.raises(
            UnsavedError, match=r"after 4 rounds, but not all of it .*File too large\)\. Make room, and"
        ):
            fit(loop)
        # Nothing else is lost.
        assert [row["round"] for row in rows(loop)] == [0, 1, 2, 3]

    ranks = ForkedRanks(run, world_size, tmp_path)
    assert not any(ranks.wait()), ranks.output(0)
    assert read(tmp_path / "version_0/last.ckpt")["epoch"] == 2
    fit(make_loop(callbacks=Checkpoint(monitor=monitor)), ckpt_path="last")
    assert [row["round"] for row in lines(tmp_path / "version_0/metrics.csv")] == ["0", "1", "2", "3"]


def test_a_worse_round_does_not_make_up_for_the_best(make_loop):
    class FillOnce(FederatedCallback):
        def on_round_start(self, round):
            limit = 3000 if round == 1 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    for scores, lost in (([3.0, 1.0, 2.0, 4.0], True), ([3.0, 2.0, 1.0, 4.0], False)):
        callbacks = [Checkpoint(monitor="score", mode="min"), Scores(scores), FillOnce()]
        loop = make_loop(callbacks=callbacks)
        if lost:
            with pytest.raises(UnsavedError, match="the best round by score`: File too large"):
                fit(loop)
        else:
            fit(loop)
        assert read(loop.run_dir / "last.ckpt")["epoch"] == 4


def test_thousands_of_runs_start_as_fast_as_ten(tmp_path):
    def seconds(count):
        folder = tmp_path / str(count)
        for number in range(count):
            (folder / f"version_{number}").mkdir(parents=True)
        (folder / "version_x").mkdir()
        (folder / f"version_{count}").write_text("no folder")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            assert newest_version(folder) == folder / f"version_{count - 1}"
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(10_000) < seconds(10) + 0.05


@pytest.mark.parametrize("devices", [1, 2])
def test_data_of_the_clients_is_not_needed_to_be_refused(make_loop, devices):
    """A folder that another run holds is refused before anything is set up."""

    class Never(type(clients())):
        def setup(self, stage=None):
            raise AssertionError

    class Meanwhile(FederatedCallback):
        def on_round_end(self, loop, round):
            if round == 1 and loop.fabric.is_global_zero:
                with pytest.raises(ConfigurationError, match="still being continued"):
                    fit(make_loop(devices=1), None, Never({}), ckpt_path="last")

    strategy = "auto" if devices == 1 else "ddp_fork"
    fit(make_loop(max_rounds=2, checkpoint_every=1, callbacks=Meanwhile(), devices=devices, strategy=strategy))
