"""A LoRA adapter on a BERT of random weights, with the warm-up of transformers."""

import pytest
import torch
from lightning import LightningModule
from torch.utils.data import Dataset

from tests.packages.harness import PackageTests

pytest.importorskip("peft")
pytest.importorskip("transformers")
from peft import LoraConfig, TaskType, get_peft_model  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup  # noqa: E402

pytestmark = pytest.mark.slow


class Sentences(LightningModule):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=3,
        )
        lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.1)
        self.model = get_peft_model(BertForSequenceClassification(config), lora)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        total = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(optimizer, int(total * 0.2), total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Tokens(Dataset):
    def __init__(self, index):
        generator = torch.Generator().manual_seed(index)
        self.tokens = torch.randint(50, (10 + index, 7), generator=generator)
        self.labels = torch.randint(3, (10 + index,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[index]}


class TestLoRA(PackageTests):
    def module(self):
        return Sentences()

    def client(self, index):
        return Tokens(index)
