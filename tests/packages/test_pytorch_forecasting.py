"""pytorch-forecasting's temporal fusion transformer, over its own windows of series."""

import numpy as np
import pytest

from tests.packages.harness import PackageTests

pytest.importorskip("pytorch_forecasting")
pandas = pytest.importorskip("pandas")
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet  # noqa: E402
from pytorch_forecasting.data import GroupNormalizer  # noqa: E402

pytestmark = pytest.mark.slow


def series(index):
    rng = np.random.default_rng(index)
    return pandas.concat(
        pandas.DataFrame(
            {
                "series": f"{name}",
                "time": np.arange(14),
                "value": np.sin(np.arange(14) + index) + rng.normal(size=14) / 10 + 2,
                "price": rng.normal(size=14),
            }
        )
        for name in "ab"
    ).reset_index(drop=True)


def windows(frame):
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=6,
        max_prediction_length=2,
        static_categoricals=["series"],
        time_varying_known_reals=["time", "price"],
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["series"]),
        add_relative_time_idx=True,
        add_target_scales=True,
        add_encoder_length=True,
    )


class TestTemporalFusionTransformer(PackageTests):
    # Its scheduler needs the validation loss after each epoch, and the harness validates after the last one only.
    local_epochs = 1

    def module(self):
        return TemporalFusionTransformer.from_dataset(windows(series(0)), hidden_size=4, hidden_continuous_size=4)

    def client(self, index):
        # With the encoders of the first client, as a federation agrees on them.
        return TimeSeriesDataSet.from_dataset(windows(series(0)), series(index))

    def collate_fn(self):
        return self.client(0).to_dataloader(batch_size=self.batch_size, num_workers=0).collate_fn
