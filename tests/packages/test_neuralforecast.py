"""neuralforecast's NHITS, which draws its windows inside the training step and keeps the losses in a list."""

import numpy as np
import pytest

from tests.packages.harness import PackageTests

pytest.importorskip("neuralforecast")
pandas = pytest.importorskip("pandas")
from neuralforecast.models import NHITS  # noqa: E402
from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset  # noqa: E402

pytestmark = pytest.mark.slow
LENGTH = 30


class TestNHITS(PackageTests):
    def module(self):
        module = NHITS(h=4, input_size=8, mlp_units=[[8, 8]] * 3, windows_batch_size=16)
        # What `NHITS.fit` sets before it calls Trainer.
        module.val_size, module.test_size = 4, 0
        return module

    def client(self, index):
        rng = np.random.default_rng(index)
        names = [f"{index}-{number}" for number in range(5 + index)]
        frame = pandas.DataFrame(
            {
                "unique_id": np.repeat(names, LENGTH),
                "ds": np.tile(np.arange(LENGTH), len(names)),
                "y": rng.normal(size=LENGTH * len(names)),
            }
        )
        return TimeSeriesDataset.from_df(frame)[0]

    def collate_fn(self):
        return TimeSeriesDataModule(self.client(0)).train_dataloader().collate_fn
