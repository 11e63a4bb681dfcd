"""Ways to run the same rounds in this process: the limit, what people write by hand, and the real loop."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, FederatedLoop
from tests.benchmarks.tasks import flat, task_of
from tests.benchmarks.work import Timing, Work

Variant = Callable[[Work], Timing]


def bare_loop(work: Work, rank: int = 0, world_size: int = 1) -> Timing:
    """The limit: nothing but the forward, backward and optimizer steps of the same minibatches.

    Args:
        work: the work.
        rank: which of several processes this is, if
        world_size: several share each cohort.
    """
    model = task_of(work).initial_model()
    optimizer = model.configure_optimizers()
    tensors = [torch.from_numpy(work.inputs), torch.from_numpy(work.targets)]
    views = [p.data for p in model.parameters()]
    initial = [v.clone() for v in views]
    start, total, seconds = flat(model), torch.zeros(work.weights.size), []
    for round in range(work.rounds):
        rows = torch.from_numpy(work.rows[round, rank::world_size])
        batches = [[[tensor[index] for tensor in tensors] for index in client] for client in rows]
        begin = _together(world_size)
        for client in batches:
            torch._foreach_copy_(views, initial)
            for k, batch in enumerate(client):
                optimizer.zero_grad()
                model.training_step(batch, k).backward()
                optimizer.step()
            if round == 0:
                total += flat(model) - start
        seconds.append(_together(world_size) - begin)
    if world_size > 1:
        torch.distributed.all_reduce(total)
    return Timing(seconds, total.numpy() / work.cohort_size)


def _together(world_size: int) -> float:
    """The time at which all processes have come here."""
    if world_size > 1:
        torch.distributed.barrier()
    return time.perf_counter()


def by_hand(work: Work) -> Timing:
    """What people write on Fabric: a copy of the model, a DataLoader and an optimizer for each client."""
    fabric = Fabric(accelerator="cpu", devices=1)
    model = task_of(work).initial_model()
    dataset = TensorDataset(torch.from_numpy(work.inputs), torch.from_numpy(work.targets))
    seconds = []
    for round in range(work.rounds):
        begin = time.perf_counter()
        states = []
        for rows in work.rows[round].tolist():
            local = copy.deepcopy(model)
            local, optimizer = fabric.setup(local, local.configure_optimizers())
            local.mark_forward_method("training_step")
            loader = fabric.setup_dataloaders(DataLoader(dataset, batch_sampler=rows))
            for k, batch in enumerate(loader):
                optimizer.zero_grad()
                fabric.backward(local.training_step(batch, k))
                optimizer.step()
            states.append(local.state_dict())
        mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
        seconds.append(time.perf_counter() - begin)
        if round == 0:
            after = torch.cat([mean[name].reshape(-1) for name, _ in model.named_parameters()])
            first = (after - flat(model)).numpy()
    return Timing(seconds, first)


def federated_loop(engine: str, callbacks: list[FederatedCallback] | None = None, **arguments: Any) -> Variant:
    """The real loop, with all its parts.

    Args:
        engine: how clients are run.
        callbacks: to look at the loop.
        **arguments: others of the loop.
    """

    def run(work: Work) -> Timing:
        task, clock = task_of(work), _Clock()
        with tempfile.TemporaryDirectory() as folder:
            loop = FederatedLoop(
                server=FedAvg(),
                max_rounds=work.rounds,
                clients_per_round=work.cohort_size,
                local_steps=work.steps if task.epochs is None else None,
                local_epochs=task.epochs,
                engine=engine,
                callbacks=[clock, *(callbacks or [])],
                out_dir=folder,
                accelerator="cpu",
                enable_progress_bar=False,
                enable_checkpointing=False,
                **arguments,
            )
            loop.fit(task.initial_model(), FederatedDataModule(task.clients(), batch_size=work.batch_size))
        return Timing(np.diff(clock.times).tolist(), clock.first)

    return run


class _Clock(FederatedCallback):
    """From the start of a round to that of the next, so that nothing is left out; and the first round's update."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first = np.empty(0)

    def on_round_start(self) -> None:
        self.times.append(time.perf_counter())

    def on_aggregate_end(self, update: Any) -> None:
        if not self.first.size:
            self.first = update.mean_delta.numpy().copy()

    def on_fit_end(self) -> None:
        self.times.append(time.perf_counter())
