"""scvi-tools' training plan around its variational autoencoder, with ELBO metrics composed of others."""

import numpy as np
import pytest
from torch.utils.data import Dataset, default_convert

from tests.packages.harness import PackageTests

scvi = pytest.importorskip("scvi")
anndata = pytest.importorskip("anndata")

pytestmark = pytest.mark.slow
GENES = 12


def cells(index):
    rng = np.random.default_rng(index)
    counts = anndata.AnnData(rng.poisson(3, size=(10 + index, GENES)).astype("float32"))
    scvi.model.SCVI.setup_anndata(counts)
    return counts


class Cells(Dataset):
    """Reads a whole minibatch at once, as the loader of scvi-tools does."""

    def __init__(self, index):
        self.rows = scvi.model.SCVI(cells(index)).adata_manager.create_torch_dataset()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __getitems__(self, indices):
        return self.rows[indices]


class TestTrainingPlan(PackageTests):
    def module(self):
        return scvi.train.TrainingPlan(scvi.model.SCVI(cells(0), n_hidden=8, n_latent=3).module)

    def client(self, index):
        return Cells(index)

    def collate_fn(self):
        return default_convert
