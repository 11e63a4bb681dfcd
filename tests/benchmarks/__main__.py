"""Time a round: ``python -m tests.benchmarks linear mlp`` prints a Markdown table of medians.

Every variant does the same work (cohort, minibatches, steps); first their updates are compared, then they are timed in
turn, and medians are reported with their ratio to a bare torch loop of the same steps. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop
from lightning_feddua.data.client_data import ClientData, minibatches
from lightning_feddua.sampling import Purpose, generator, sample_cohort
from tests.benchmarks.tasks import TASKS, Task

TOLERANCE = 1e-3
# A variant runs some rounds and gives the seconds of each, and the mean update of the first.
Variant = Callable[[Task, int], tuple[list[float], Tensor]]


def flat(module: torch.nn.Module) -> Tensor:
    """The module's parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def bare_loop(task: Task, rounds: int) -> tuple[list[float], Tensor]:
    """The limit: nothing but the forward, backward and optimizer steps of the same minibatches."""
    torch.manual_seed(0)
    model, clients = task.make_model(), task.clients()
    optimizer = model.configure_optimizers()
    start, seconds = flat(model), []
    views = [p.data for p in model.parameters()]
    initial = [v.clone() for v in views]
    for round in range(rounds):
        cohort = sample_cohort(0, round, len(clients), task.clients_per_round)
        batches = []
        for i in cohort:
            data = ClientData(clients.at(i))
            order = minibatches(
                len(data), task.batch_size, generator(0, round, i, Purpose.MINIBATCHES), steps=task.steps
            )
            batches.append([data.batch(positions) for _, positions in order])
        total = torch.zeros_like(start)
        begin = time.perf_counter()
        for client in batches:
            torch._foreach_copy_(views, initial)
            for k, batch in enumerate(client):
                optimizer.zero_grad()
                model.training_step(batch, k).backward()
                optimizer.step()
            if round == 0:
                total += flat(model) - start
        seconds.append(time.perf_counter() - begin)
        if round == 0:
            first = total / len(cohort)
    return seconds, first


def by_hand(task: Task, rounds: int) -> tuple[list[float], Tensor]:
    """What people write on Fabric: a copy of the model, a DataLoader and an optimizer for each client."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    model, clients = task.make_model(), task.clients()
    seconds = []
    for round in range(rounds):
        cohort = sample_cohort(0, round, len(clients), task.clients_per_round)
        begin = time.perf_counter()
        states = []
        for i in cohort:
            local = copy.deepcopy(model)
            local, optimizer = fabric.setup(local, local.configure_optimizers())
            local.mark_forward_method("training_step")
            rng = generator(0, round, i, Purpose.MINIBATCHES)
            order = [p.tolist() for _, p in minibatches(clients.sizes[i], task.batch_size, rng, steps=task.steps)]
            loader = fabric.setup_dataloaders(DataLoader(clients.at(i), batch_sampler=order))
            for k, batch in enumerate(loader):
                optimizer.zero_grad()
                fabric.backward(local.training_step(batch, k))
                optimizer.step()
            states.append(local.state_dict())
        mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
        seconds.append(time.perf_counter() - begin)
        if round == 0:
            first = torch.cat([mean[name].reshape(-1) for name, _ in model.named_parameters()]) - flat(model)
    return seconds, first


def this_project(engine: str) -> Variant:
    """The real loop, with all its parts."""

    def run(task: Task, rounds: int) -> tuple[list[float], Tensor]:
        first: list[Tensor] = []

        class Keep(FederatedCallback):
            def on_aggregate_end(self, update) -> None:
                if not first:
                    first.append(update.mean_delta.clone())

        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            loop = FederatedLoop(
                server=FedAvg(),
                max_rounds=rounds,
                clients_per_round=task.clients_per_round,
                local_steps=task.steps,
                engine=engine,
                callbacks=[Keep()],
                out_dir=folder,
                accelerator="cpu",
                enable_progress_bar=False,
            )
            loop.fit(task.make_model(), FederatedDataModule(task.clients(), batch_size=task.batch_size))
        return [row["seconds"] for row in loop.history], first[0]

    return run


VARIANTS: dict[str, Variant] = {
    "bare loop of the same steps": bare_loop,
    "by hand on Fabric": by_hand,
    "FederatedLoop, sequential": this_project("sequential"),
    "FederatedLoop, vectorized": this_project("vectorized"),
}


def measure(name: str, repetitions: int, rounds: int) -> list[tuple[str, float]]:
    """Median seconds of a round of each variant, after a check that they compute the same."""
    task = TASKS[name]
    small = replace(task, steps=min(task.steps, 3))
    expected = bare_loop(small, 1)[1]
    usable = {}
    for label, variant in VARIANTS.items():
        difference = (variant(small, 1)[1] - expected).norm() / expected.norm()
        if difference > TOLERANCE:
            sys.exit(f"{name}: `{label}` computes another update: relative difference {difference:.1e}")
        usable[label] = variant
    times: dict[str, list[float]] = {label: [] for label in usable}
    for _ in range(repetitions):
        for label, variant in usable.items():
            # The first round warms up.
            times[label] += variant(task, rounds + 1)[0][1:]
    return [(label, statistics.median(values)) for label, values in times.items()]


def main() -> None:
    """Print one table for each task."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("tasks", nargs="*", default=["linear"], choices=[*TASKS, []], help="what to time")
    parser.add_argument("--repetitions", type=int, default=3, help="how often the variants take turns")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds in each turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.tasks:
        rows = measure(name, arguments.repetitions, arguments.rounds)
        print(
            f"\n{name}, {arguments.threads} threads, medians of {arguments.repetitions} x {arguments.rounds} rounds\n"
        )
        print("| variant | seconds a round | ratio |\n|---|---|---|")
        for label, seconds in rows:
            print(f"| {label} | {seconds:.4f} | {seconds / rows[0][1]:.2f} |")


if __name__ == "__main__":
    main()
