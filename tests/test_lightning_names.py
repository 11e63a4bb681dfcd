import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn

from lightning_feddua import FederatedLoop
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.lightning_names import is_datamodule, is_module, is_overridden, lightning_classes, package_of


def regression(package):
    class Regression(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(10, 1)

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self.layer(batch[0]).reshape(-1), batch[1].reshape(-1))
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch):
            self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]).reshape(-1), batch[1].reshape(-1)))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Regression()


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_modules_are_known_by_either_name(package):
    module = regression(package)
    assert is_module(module)
    assert not is_datamodule(module)
    assert is_datamodule(package.LightningDataModule())
    assert is_overridden("training_step", module)
    assert not is_overridden("test_step", module)
    assert package_of(module) == package.__name__


def test_what_is_of_neither_package_is_no_module():
    assert not is_module(nn.Linear(1, 1))
    assert lightning_classes("NoSuchClass") == ()
    with pytest.raises(TypeError, match="`Linear` is not a class of Lightning's"):
        is_overridden("training_step", nn.Linear(1, 1))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_both_names_give_the_same_run(tmp_path, engine):
    weights = []
    for package in (lightning.pytorch, pytorch_lightning):
        loop = FederatedLoop(
            max_rounds=2,
            local_epochs=1,
            engine=engine,
            precision="64-true",
            out_dir=tmp_path,
            enable_progress_bar=False,
        )
        loop.fit(regression(package), SyntheticRegression(num_clients=4, dim=10))
        assert {"train_loss", "val_loss"} <= loop.history[-1].keys()
        weights.append(loop.weights)
    assert torch.equal(*weights)
