"""What a Flower client does. A module of its own, so that Ray's actors import it once and keep what it loads."""

from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from lightning import LightningModule
from torch import Tensor

from tests.benchmarks.tasks import task_of
from tests.benchmarks.work import Work

app = ClientApp()


@cache
def _load(path: str) -> tuple[Work, LightningModule, Tensor, Tensor]:
    """The work and a module for it, once in each actor."""
    work = Work.load(Path(path))
    return work, task_of(work).initial_model(), torch.from_numpy(work.inputs), torch.from_numpy(work.targets)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the client at this node's place in the cohort."""
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    work, model, inputs, targets = _load(config["work"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = model.configure_optimizers()
    for k, index in enumerate(
        torch.from_numpy(work.rows[config["server-round"] - 1, context.node_config["partition-id"]])
    ):
        optimizer.zero_grad()
        model.training_step([inputs[index], targets[index]], k).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(content), reply_to=message)
