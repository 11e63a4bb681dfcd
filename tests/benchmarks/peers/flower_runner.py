"""Rounds under Flower: its simulation with Ray actors, one for each process, and the FedAvg strategy."""

import os
import time

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from tests.benchmarks.peers.flower_client import app as client_app
from tests.benchmarks.tasks import flat, task_of
from tests.benchmarks.work import Timing, Work, runner_arguments


def main() -> None:
    arguments = runner_arguments()
    work = Work.load(arguments.work)
    model = task_of(work).initial_model()
    start = flat(model)
    times: list[float] = []
    after_first: list[ArrayRecord] = []
    server_app = ServerApp()

    def after_round(round: int, arrays: ArrayRecord) -> None:
        """Flower calls this before the first round and after each."""
        times.append(time.perf_counter())
        if round == 1:
            after_first.append(arrays)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        FedAvg(fraction_train=1.0, fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=work.rounds,
            train_config=ConfigRecord({"work": str(arguments.work), "threads": arguments.threads}),
            evaluate_fn=after_round,
        )

    torch.set_num_threads(arguments.threads)
    run_simulation(
        server_app,
        client_app,
        num_supernodes=work.cohort_size,
        backend_config={
            "init_args": {"num_cpus": arguments.threads * arguments.processes},
            "client_resources": {"num_cpus": arguments.threads, "num_gpus": 0.0},
        },
    )
    model.load_state_dict(after_first[0].to_torch_state_dict())
    Timing(np.diff(times).tolist(), (flat(model) - start).numpy()).report(arguments.update)


if __name__ == "__main__":
    main()
