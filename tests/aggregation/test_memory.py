"""The memory of a rank: a model as Trainer would hold it, and six vectors for the server."""

import re
import subprocess
import sys

import pytest

SCRIPT = """
import re, sys, tempfile, torch
from lightning import LightningModule
from torch.utils.data import TensorDataset
from lightning_feddua import FedDuAdam, FederatedDataModule, FederatedLoop

D = 1 << 24

class Large(LightningModule):
    def __init__(self, size):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(size))

    def training_step(self, batch, batch_idx):
        # The gradient of a few entries, which takes no memory beside the gradient itself.
        return (self.table[batch[0]] - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(size, clients, cohort, lanes):
    torch.manual_seed(0)
    data = {str(i): TensorDataset(torch.randint(size, (4,)), torch.randn(4)) for i in range(clients)}
    with tempfile.TemporaryDirectory() as folder:
        loop = FederatedLoop(server=FedDuAdam(), max_rounds=3, clients_per_round=cohort, local_steps=2, out_dir=folder,
                             lanes=lanes, engine="sequential", accelerator="cpu", enable_progress_bar=False)
        loop.fit(Large(size), FederatedDataModule(data, val_dataset=data["0"], batch_size=4))

def peak():
    # Not `getrusage`, which knows the peak of the process that this one was forked from.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def bare():
    model = Large(D)
    optimizer = model.configure_optimizers()
    for k in range(3):
        optimizer.zero_grad()
        model.training_step([torch.randint(D, (4,)), torch.randn(4)], k).backward()
        optimizer.step()

fit(1000, 3, 2, 8)
bare()
before = peak()
fit(D, *map(int, sys.argv[1:3]), lanes=int(sys.argv[3]) or None)
print(f"vectors {(peak() - before) / (4 * D):.3f}", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("clients", "cohort", "ranks", "lanes", "vectors"),
    [
        pytest.param(4, 2, 1, 8, 6, marks=pytest.mark.slow),
        pytest.param(40, 20, 1, 8, 6, marks=pytest.mark.slow),
        pytest.param(40, 20, 2, 8, 6, marks=pytest.mark.slow),
        pytest.param(40, 20, 3, 8, 6, marks=pytest.mark.slow),
        pytest.param(40, 20, 4, 8, 6, marks=pytest.mark.slow),
        pytest.param(40, 20, 2, 0, 5, marks=pytest.mark.slow),
    ],
)
def test_vectors_that_a_rank_takes_besides_the_model(tmp_path, clients, cohort, ranks, lanes, vectors):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    arguments = map(str, (clients, cohort, lanes))
    run = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    # Not line by line: two ranks may write into one.
    found = [float(count) for count in re.findall(r"vectors (\d+\.\d{3})", run.stdout)]
    assert len(found) == ranks
    # 64 MB each, and 8 to 28 MB of other things besides; one vector more would show as 1.
    assert all(vectors - 0.5 < count < vectors + 0.5 for count in found), found
