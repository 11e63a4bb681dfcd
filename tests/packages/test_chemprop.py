"""chemprop's message passing network for molecules, with its own batches and its Noam-like schedule."""

import numpy as np
import pytest

from tests.packages.harness import PackageTests

chemprop = pytest.importorskip("chemprop")
from chemprop import data, models, nn  # noqa: E402

pytestmark = pytest.mark.slow
MOLECULES = ["CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCC", "CNC", "OCCO", "c1ccncc1", "CC#N", "CCCl", "C1CCCCC1"]


class TestMPNN(PackageTests):
    # Two of them are for the warm-up.
    local_epochs = 3

    def module(self):
        return models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN(), batch_norm=True)

    def client(self, index):
        rng = np.random.default_rng(index)
        molecules = rng.choice(MOLECULES, size=10 + index)
        return data.MoleculeDataset(
            [data.MoleculeDatapoint.from_smi(molecule, rng.normal(size=1)) for molecule in molecules]
        )

    def collate_fn(self):
        return data.collate_batch
