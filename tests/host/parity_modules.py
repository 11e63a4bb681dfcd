"""Modules as people write them for Trainer, and data for them."""

import torch
from lightning import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, ManualOptimBoringModel, Net
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


def features(size=24):
    return torch.utils.data.Subset(
        _Rows(torch.randn(size, 32, generator=torch.Generator().manual_seed(0))), range(size)
    )


class _Rows(Dataset):
    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, i):
        return self.tensor[i]


def labelled(size=24, shape=(32,), classes=3):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(size, *shape, generator=generator), torch.randint(classes, (size,), generator=generator)
    )


def tokens(size=16, length=6, vocabulary=20):
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(vocabulary, (size, length + 1), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


class Common(LightningModule):
    """The usual classifier; subclasses vary one practice each."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class BatchNormAndDropout(Common):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


class StepScheduler(Common):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9, nesterov=True, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class EpochScheduler(Common):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3)]


class DictOutput(Common):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None  # skip
        return {"loss": super().training_step(batch, batch_idx), "extra": 1}


class OnlyBatch(Common):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class AnyArguments(Common):
    def training_step(self, *args):
        return super().training_step(*args)


class BatchAndKeywords(Common):
    def training_step(self, batch, **kwargs):
        return super().training_step(batch, 0)


class Hooks(Common):
    """Gradients and batches changed in hooks; overridden optimizer methods."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]

    def on_train_batch_start(self, batch, batch_idx):
        batch[0].add_(0.1 * batch_idx)

    def on_before_backward(self, loss):
        self.seen = loss.detach()

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.add_(0.01)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + self.trainer.global_step)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="value")


class Counters(Common):
    """Depends on every counter that modules read."""

    def training_step(self, batch, batch_idx):
        scale = 1 + self.current_epoch + 0.1 * self.global_step + 0.01 * batch_idx
        return scale * super().training_step(batch, batch_idx)


class FrozenAndTied(Common):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        self.net[0].requires_grad_(False)
        self.net[2].weight = nn.Parameter(torch.eye(32))
        self.unused = nn.Linear(4, 4)
        self.tied = nn.Linear(32, 3)
        self.tied.weight = self.net[4].weight


class TwoOptimizers(Common):
    """Manual optimization as in a GAN: toggled optimizers, clipping, a scheduler stepped by hand."""

    steps_per_batch = 2  # Trainer counts steps of both optimizers

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(32, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = nn.functional.cross_entropy(self.net(x) + self.other(x), y)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model():
            loss = nn.functional.cross_entropy(self.net(x) + self.other(x), y)
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
        self.lr_schedulers().step()
        self.log_dict({"a": loss, "b": 1.0})

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net.parameters(), lr=0.1)
        second = torch.optim.Adam(self.other.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2)]


class ManualDictOutput(Common):
    """Manual optimization that returns something else than a loss."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        return {"index": batch_idx}


class LBFGS(Common):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Metrics(Common):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.collection = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="c_")

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.collection.update(logits, batch[1])
        self.log_dict(self.collection)
        return nn.functional.cross_entropy(logits, batch[1])


class Skips(Common):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


class AsksHowLong(Common):
    """A schedule over all steps that there will be."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=self.trainer.max_steps + 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ConvNet(Common):
    def __init__(self):
        super().__init__()
        self.net = Net()  # Lightning's demo network, with dropout


class SmallTransformer(LightningTransformer):
    def __init__(self):
        super().__init__(vocab_size=20)

    def prepare_data(self):
        """Trainer would download the demo's text."""


class SmallLSTM(LightningLSTM):
    def __init__(self):
        super().__init__(vocab_size=20)

    def prepare_data(self):
        """Trainer would download the demo's text."""


IMAGES = labelled(shape=(1, 28, 28), classes=10)


CASES = {
    "BoringModel": (BoringModel, features(), {}),
    "ManualOptimBoringModel": (ManualOptimBoringModel, features(), {}),
    "DemoModel": (DemoModel, features(), {}),
    "LightningTransformer": (SmallTransformer, tokens(), {}),
    "LightningLSTM": (SmallLSTM, tokens(), {}),
    "Net": (ConvNet, IMAGES, {}),
    "adam": (Common, labelled(), {}),
    "batch norm and dropout": (BatchNormAndDropout, labelled(), {}),
    "step scheduler": (StepScheduler, labelled(), {}),
    "epoch scheduler": (EpochScheduler, labelled(), {}),
    "clipping": (StepScheduler, labelled(), {"gradient_clip_val": 0.1}),
    "dict output and skipped step": (DictOutput, labelled(), {}),
    "training_step(batch)": (OnlyBatch, labelled(), {}),
    "training_step(*args)": (AnyArguments, labelled(), {}),
    "training_step(batch, **kwargs)": (BatchAndKeywords, labelled(), {}),
    "manual with a dict": (ManualDictOutput, labelled(), {}),
    "hooks": (Hooks, labelled(), {}),
    "counters": (Counters, labelled(), {}),
    "frozen, tied and unused": (FrozenAndTied, labelled(), {}),
    "two optimizers": (TwoOptimizers, labelled(), {}),
    "lbfgs": (LBFGS, labelled(), {}),
    "metrics": (Metrics, labelled(), {}),
    "skips the rest of a pass": (Skips, labelled(), {}),
    "schedules by the trainer": (AsksHowLong, labelled(), {}),
    "64-true": (BatchNormAndDropout, labelled(), {"precision": "64-true"}),
    "bf16-mixed": (BatchNormAndDropout, labelled(), {"precision": "bf16-mixed"}),
    "bf16-true": (Common, labelled(), {"precision": "bf16-true"}),
    "16-mixed": (Common, labelled(), {"precision": "16-mixed", "gradient_clip_val": 0.1}),
}
