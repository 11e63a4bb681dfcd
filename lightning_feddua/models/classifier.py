import torch
from lightning import LightningModule
from torch import Tensor, nn

from lightning_feddua._private import trainer_of
from lightning_feddua.errors import ConfigurationError


class Classifier(LightningModule):
    """Cross-entropy, accuracy and SGD around a network: what the paper's classification tasks share.

    Args:
        network: gives a logit for each class.
        num_classes: the number of classes.
        lr: the local learning rate η_l.
        weight_decay: coupled, added to the (clipped) gradient.
    """

    def __init__(self, network: nn.Module, num_classes: int, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.network = network
        self.num_classes = num_classes
        self.lr = lr
        self.weight_decay = weight_decay

    def setup(self, stage: str) -> None:
        """Check that the data has no more classes than the network."""
        classes = getattr(getattr(trainer_of(self), "datamodule", None), "num_classes", None)
        if classes is not None and classes > self.num_classes:
            raise ConfigurationError(
                f"The data has labels up to {classes - 1}, and `{type(self).__name__}` has {self.num_classes} classes.",
                f"Set the model's `num_classes` to {classes}.",
            )

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.network(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean cross-entropy."""
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_acc``."""
        self._evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_acc``."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: list[Tensor], prefix: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{prefix}_loss", nn.functional.cross_entropy(logits, y))
        self.log(f"{prefix}_acc", (logits.argmax(dim=1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
