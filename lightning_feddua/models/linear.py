import torch
from lightning import LightningModule
from torch import Tensor, nn


class LinearRegression(LightningModule):
    """Least squares without a bias, from zero weights: the model of the paper's synthetic task.

    Args:
        dim: the number of inputs.
        lr: the local learning rate η_l.
    """

    def __init__(self, dim: int = 1000, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.linear = nn.Linear(dim, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions, one a row."""
        return self.linear(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """``1/(2n) ‖Xw − y‖²``."""
        x, y = batch
        return 0.5 * nn.functional.mse_loss(self(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the same loss as ``val_loss``."""
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)
