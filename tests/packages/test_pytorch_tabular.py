"""pytorch-tabular's model of embeddings and an MLP, as its low-level interface creates it."""

import numpy as np
import pytest
import torch

from lightning_feddua import FedAvg
from tests.packages.harness import PackageTests

pytest.importorskip("pytorch_tabular")
pandas = pytest.importorskip("pandas")
from omegaconf import OmegaConf  # noqa: E402
from pytorch_tabular import TabularModel  # noqa: E402
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig  # noqa: E402
from pytorch_tabular.models import CategoryEmbeddingModelConfig  # noqa: E402

pytestmark = pytest.mark.slow


def table(index):
    rng = np.random.default_rng(index)
    size = 30 + index
    columns = {"a": rng.normal(size=size), "b": rng.normal(size=size), "kind": np.resize(["x", "y", "z"], size)}
    return pandas.DataFrame({**columns, "label": np.resize([0, 1], size)})


def tabular_model():
    return TabularModel(
        data_config=DataConfig(target=["label"], continuous_cols=["a", "b"], categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="8-4", dropout=0.1),
        optimizer_config=OptimizerConfig(lr_scheduler="CosineAnnealingLR", lr_scheduler_params={"T_max": 5}),
        trainer_config=TrainerConfig(),
        verbose=False,
    )


class TestCategoryEmbedding(PackageTests):
    def module(self):
        model = tabular_model()
        return model.prepare_model(model.prepare_dataloader(table(0), table(2)))

    def client(self, index):
        return tabular_model().prepare_dataloader(table(index), table(2)).train_dataset

    def validation(self):
        return tabular_model().prepare_dataloader(table(0), table(2)).validation_dataset

    def test_a_checkpoint_has_the_configuration(self, tmp_path):
        """Which pytorch-tabular keeps as a dictionary of OmegaConf, with lists of OmegaConf in it."""
        module, loop = self.fit(tmp_path, FedAvg(), rounds=1)
        saved = torch.load(loop.run_dir / "last.ckpt", weights_only=True)["hyper_parameters"]
        assert saved == OmegaConf.to_container(module.hparams)
        assert saved["continuous_cols"] == ["a", "b"]
