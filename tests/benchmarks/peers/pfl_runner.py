"""Rounds under pfl: in-memory user datasets, federated averaging, the simulated backend; several ranks by torchrun."""

import time
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from tests.benchmarks.tasks import flat, task_of
from tests.benchmarks.work import Timing, Work, runner_arguments


class Module(nn.Module):
    """The task's module as pfl wants it."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.module = task_of(work).initial_model()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.module.training_step([inputs, targets], 0)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
        # Nothing is evaluated in the other variants either.
        return {"samples": Weighted(0.0, len(targets))}


class Clock(TrainingProcessCallback):
    """Notes when rounds end, and the first round's update."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._start = flat(model.pytorch_model)
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, *args: Any, central_iteration: int, **kwargs: Any) -> tuple[bool, Metrics]:
        self.times.append(time.perf_counter())
        if central_iteration == 0:
            model = args[1]
            self.update = (flat(model.pytorch_model) - self._start).numpy()
        return False, Metrics()


def main() -> None:
    arguments = runner_arguments()
    torch.set_num_threads(arguments.threads)
    work = Work.load(arguments.work)
    module = Module(work)
    sgd = partial(torch.optim.SGD, weight_decay=work.weight_decay)
    model = PyTorchModel(module, sgd, torch.optim.SGD(module.parameters(), lr=1.0))
    inputs, targets = torch.from_numpy(work.inputs), torch.from_numpy(work.targets)

    def user_dataset(user: int) -> PyTorchTensorDataset:
        rows = torch.from_numpy(work.client_rows(*divmod(user, work.cohort_size)))
        return PyTorchTensorDataset((inputs[rows], targets[rows]), user_id=str(user))

    # Users are drawn one after another, in the order of rounds and cohorts.
    users = FederatedDataset(user_dataset, partial(next, count()))
    clock = Clock()
    FederatedAveraging().run(
        # pfl evaluates in the first round in any case, which is not timed.
        NNAlgorithmParams(
            work.rounds, evaluation_frequency=work.rounds, train_cohort_size=work.cohort_size, val_cohort_size=None
        ),
        SimulatedBackend(users, val_data=None),
        model,
        NNTrainHyperParams(local_batch_size=work.batch_size, local_num_epochs=1, local_learning_rate=work.lr),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if get_default_framework_module().distributed.global_rank == 0:
        Timing(np.diff(clock.times).tolist(), clock.update).report(arguments.update)


if __name__ == "__main__":
    main()
