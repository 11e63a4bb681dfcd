"""A rank of the distributed tests: several small runs, and rank 0 saves the results in a file."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed

from lightning_feddua import FedAdam, FedDuAdagrad, FederatedCallback, FederatedDataModule, FederatedLoop
from lightning_feddua.aggregation import collectives
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression
from tests.modules import Classifier, classification


class Recorder(FederatedCallback):
    """Cohorts, the samples of each client's first batch, and what is exchanged in each round."""

    def __init__(self):
        self.cohorts = []
        self.collectives = []
        self._counts = {"all_reduce": 0, "other": 0}

    def count(self, name):
        original = getattr(torch.distributed, name)

        def counted(*args, **kwargs):
            self._counts["all_reduce" if name == "all_reduce" else "other"] += 1
            return original(*args, **kwargs)

        setattr(torch.distributed, name, counted)

    def on_round_start(self, cohort):
        self.cohorts.append(cohort)
        self._counts.update(all_reduce=0, other=0)

    def on_aggregate_end(self):
        self.collectives.append(dict(self._counts))


class Batches(LinearRegression):
    """Logs a fingerprint of its minibatches."""

    def training_step(self, batch, batch_idx):
        self.log("fingerprint", batch[0].sum())
        return super().training_step(batch, batch_idx)


def run(name, out_dir, model, data, **arguments):
    recorder = Recorder()
    for collective in (
        *("all_reduce", "broadcast", "all_gather", collectives._GATHER_INTO, "all_gather_object"),
        *("all_to_all_single", "reduce", "gather", "barrier"),
    ):
        recorder.count(collective)
    loop = FederatedLoop(
        max_rounds=20, out_dir=out_dir, callbacks=[recorder], accelerator="cpu", enable_progress_bar=False, **arguments
    )
    loop.fit(model, data)
    return {
        "name": name,
        "world_size": loop.fabric.world_size,
        "cohorts": recorder.cohorts,
        "collectives": recorder.collectives,
        "history": [{key: value for key, value in row.items() if key != "seconds"} for row in loop.history],
        "state": model.state_dict(),
    }


def main(out_dir):
    rank = int(os.environ["RANK"])
    torch.manual_seed(torch.distributed.is_torchelastic_launched() * 1000 + rank)
    synthetic = SyntheticRegression(num_clients=9, samples_per_client=25, dim=40, batch_size=10)
    clients = {str(i): classification(20 + 7 * i, seed=i) for i in range(7)}
    classes = FederatedDataModule(clients, classification(101, seed=99), batch_size=16, eval_batch_size=10)
    results = [
        run(
            "partial",
            out_dir,
            Batches(dim=40, lr=0.05),
            synthetic,
            server=FedDuAdagrad(),
            clients_per_round=4,
            local_steps=5,
            precision="64-true",
        ),
        run(
            "idle rank",
            out_dir,
            Batches(dim=40, lr=0.05),
            synthetic,
            server=FedDuAdagrad(),
            clients_per_round=1,
            local_steps=5,
            precision="64-true",
            validate_every=0,
        ),
        # Weights that differ on every rank until rank 0's are broadcast.
        run(
            "classifier",
            out_dir,
            Classifier(dropout=0.5).double(),
            classes,
            server=FedAdam(),
            clients_per_round=3,
            local_epochs=1,
            precision="64-true",
        ),
    ]
    if rank == 0:
        torch.save(results, Path(out_dir) / "results.pt")


if __name__ == "__main__":
    main(sys.argv[1])
