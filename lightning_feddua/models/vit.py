import torch
from torch import Tensor, nn

from lightning_feddua.models.classifier import Classifier


class ViT(Classifier):
    """A small Vision Transformer for images of 32 by 32 pixels; 6,303,460 parameters with 100 classes.

    Args:
        num_classes: the number of classes.
        patch: the side of a patch in pixels.
        hidden: the width of the model and of its MLPs.
        layers: the number of encoder layers.
        heads: the number of attention heads.
        lr: the local learning rate.
        weight_decay: coupled weight decay.
    """

    def __init__(
        self,
        num_classes: int = 100,
        patch: int = 4,
        hidden: int = 384,
        layers: int = 7,
        heads: int = 12,
        lr: float = 0.01,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__(_ViT(num_classes, patch, hidden, layers, heads), num_classes, lr, weight_decay)
        self.save_hyperparameters()


class _ViT(nn.Module):
    def __init__(self, num_classes: int, patch: int, hidden: int, layers: int, heads: int, image: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, hidden))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, hidden))
        self.encoder = nn.Sequential(*(_EncoderLayer(hidden, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], dim=1) + self.positions
        return self.head(self.encoder(tokens)[:, 0])


class _EncoderLayer(nn.Module):
    """Pre-norm attention and an MLP that ends in a GELU, each with a residual connection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = _SelfAttention(hidden, heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(x)


class _SelfAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
