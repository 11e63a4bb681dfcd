import pytest
import torch

from lightning_feddua import ClientError, ConfigurationError, FederatedDataModule, FederatedLoop
from lightning_feddua.models import CharLSTM, FemnistCNN, ResNet18, ViT


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (FemnistCNN, 1_206_590),
        (CharLSTM, 1_093_199),
        (lambda: ResNet18(10), 11_173_962),
        (lambda: ResNet18(100), 11_220_132),
        (ViT, 6_303_460),
    ],
)
def test_parameter_counts_are_the_papers(model, count):
    assert sum(p.numel() for p in model().parameters()) == count


@pytest.mark.parametrize(
    ("model", "batch", "classes"),
    [
        (FemnistCNN(), torch.rand(2, 1, 28, 28), 62),
        (CharLSTM(), torch.randint(79, (2, 80), dtype=torch.uint8), 79),
        (ResNet18(10), torch.randn(2, 3, 32, 32), 10),
        (ViT(), torch.randn(2, 3, 32, 32), 100),
    ],
)
def test_logits_and_gradients(model, batch, classes):
    loss = model.training_step([batch, torch.tensor([0, classes - 1])], 0)
    assert model(batch).shape == (2, classes)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_labels_beyond_the_models_classes(tmp_path):
    dataset = torch.utils.data.TensorDataset(torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 2, 62]))
    data = FederatedDataModule({"a": dataset})
    data.num_classes = 63
    loop = FederatedLoop(local_steps=1, out_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match=r"labels up to 62, and `FemnistCNN` has 62 classes\. Set"):
        loop.fit(FemnistCNN(), data)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_labels_that_nobody_has_counted(engine, tmp_path):
    dataset = torch.utils.data.TensorDataset(torch.rand(2, 1, 28, 28), torch.tensor([0, 62]))
    loop = FederatedLoop(
        local_steps=1, engine=engine, out_dir=tmp_path, accelerator="cpu", enable_progress_bar=False, max_rounds=1
    )
    with pytest.raises((ClientError, ConfigurationError), match=r"IndexError: Target 62 is out of bounds\."):
        loop.fit(FemnistCNN(), FederatedDataModule({"a": dataset, "b": dataset}))
