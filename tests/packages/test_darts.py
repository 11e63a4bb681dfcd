"""The module inside a model of darts, with its own batches, and a scheduler that it returns as a bare dictionary."""

import numpy as np
import pytest
import torch

from tests.packages.harness import PackageTests

darts = pytest.importorskip("darts")
from darts.models import NBEATSModel  # noqa: E402
from darts.utils.data.torch_datasets.training_dataset import SequentialTorchTrainingDataset  # noqa: E402
from darts.utils.data.torch_datasets.utils import _batch_collate_fn_train  # noqa: E402

pytestmark = pytest.mark.slow


def series(index):
    values = np.random.default_rng(index).normal(size=17 + index)
    return darts.TimeSeries.from_values(values.astype("float32"))


class TestNBEATS(PackageTests):
    def module(self):
        model = NBEATSModel(
            input_chunk_length=6,
            output_chunk_length=2,
            num_stacks=2,
            num_blocks=1,
            layer_widths=8,
            dropout=0.1,
            random_state=0,
            lr_scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
            lr_scheduler_kwargs={"gamma": 0.5},
            pl_trainer_kwargs={"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False},
        )
        # darts creates the module when it sees the first series.
        model.fit(series(0), epochs=1)
        return model.model

    def client(self, index):
        return SequentialTorchTrainingDataset(series(index), input_chunk_length=6, output_chunk_length=2)

    def collate_fn(self):
        return _batch_collate_fn_train
