"""Long runs and many runs: memory, open files and the time of a round stay as they are."""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_feddua import FedDuAdam, FederatedCallback
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.files import find_last
from lightning_feddua.clients import Scaffold
from tests.checkpoints.checkpointed_runs import clients, make
from tests.modules import Classifier

ROUNDS = 5000


class Plain(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Watch(FederatedCallback):
    """Notes what the process holds after each round, and how much computing a round with its save has taken."""

    def __init__(self):
        self.resident, self.open, self.seconds = [], [], []
        self._last = None

    def on_round_start(self, loop, round):
        now = time.process_time()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now
        self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        self.open.append(len(os.listdir("/proc/self/fd")))


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_thousands_of_rounds_leave_nothing_behind(tmp_path, keep):
    """What grows is the history: a kilobyte for each round."""
    watch = Watch()
    loop = make(
        server=FedDuAdam(),
        client=Scaffold(),
        client_states=keep,
        max_rounds=ROUNDS,
        local_steps=1,
        local_lr_decay=1.0,
        clients_per_round=2,
        validate_every=50,
        out_dir=tmp_path,
        engine="sequential",
        callbacks=[watch, Checkpoint(monitor="loss", save_top_k=2)],
    )
    loop.fit(Plain(), clients())
    grown = watch.resident[-1] - watch.resident[ROUNDS // 10]
    early, late = (statistics.median(part) for part in (watch.seconds[50:550], watch.seconds[-500:]))
    print(f"\n{keep}: {grown / ROUNDS / 0.9:.0f} bytes a round, {1e3 * early:.2f} and {1e3 * late:.2f} ms a round")
    print(f"{watch.resident[-1] / 2**20:.0f} MB, {watch.open[-1]} open files")
    assert grown < 4096 * ROUNDS
    assert max(watch.open[ROUNDS // 10 :]) <= max(watch.open[: ROUNDS // 10])
    assert late < 2 * early


@pytest.mark.slow
def test_ten_thousand_runs_in_a_folder_start_as_fast_as_ten(tmp_path):
    """``fit`` of a new run, and of the newest that has a checkpoint, which is thousands of folders down at worst."""
    script = """
import sys, time
from tests.checkpoints.checkpointed_runs import clients, make
from tests.modules import Classifier
loop = make(max_rounds=int(sys.argv[3]), local_steps=1, out_dir=sys.argv[1], engine="sequential", checkpoint_every=1)
data, model = clients(), Classifier()
start = time.perf_counter()
loop.fit(model, data, {"last": "last", "new": None}[sys.argv[2]])
print("seconds", time.perf_counter() - start)
"""

    def seconds(folder, how, rounds):
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder), how, str(rounds)], capture_output=True, text=True, check=True
        )
        return float(done.stdout.split("seconds ")[1].split()[0])

    found = {}
    for count in (10, 10_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        found[count, "first"] = seconds(folder, "new", 1)
        for number in range(1, count):
            path = folder / f"version_{number}"
            path.mkdir()
            (path / "metrics.csv").write_text("round,loss\n0,1\n")
        # The newest run with a checkpoint is the oldest of all.
        found[count, "last"] = min(seconds(folder, "last", rounds) for rounds in (2, 3, 4))
        found[count, "new"] = min(seconds(folder, "new", 1) for _ in range(3))
    print("", *(f"{how} among {count}: {1e3 * value:.0f} ms" for (count, how), value in found.items()), sep="\n")
    start = time.perf_counter()
    assert find_last(tmp_path / "10000") is not None
    print(f"looking for the last: {1e3 * (time.perf_counter() - start):.0f} ms")
    for how in ("last", "new"):
        assert found[10_000, how] < found[10, how] + 0.5
