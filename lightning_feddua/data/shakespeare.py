"""Shakespeare: next-character prediction, one client per speaking role (LEAF)."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lightning_feddua.data.hub import arrow_column, load_split
from lightning_feddua.data.natural import NaturalDataModule
from lightning_feddua.data.partition import Partition
from lightning_feddua.errors import ConfigurationError

SYMBOLS = " !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WINDOW = 80


class Shakespeare(NaturalDataModule):
    """Windows of 80 characters, each with the character that follows; there are 79 symbols.

    The first windows of a role are for training. The next ones overlap with those, and are dropped. The rest is pooled
    over all roles for validation.

    Args:
        path: a hub id, or a local folder with the same files.
        num_clients: the number of roles, chosen at random; None for all.
        min_samples: the minimum number of windows per role.
        train_fraction: the fraction of a role's windows that is for training.
        max_eval_samples: the number of windows for validation, chosen at random; None for all.
        batch_size: the size of a local minibatch.
        eval_batch_size: the batch size in validation and test.
        seed: the seed of the choice of roles and of the windows for validation.
    """

    num_classes = len(SYMBOLS)

    def __init__(
        self,
        path: str = "flwrlabs/shakespeare",
        num_clients: int | None = 100,
        min_samples: int = 1000,
        train_fraction: float = 0.9,
        max_eval_samples: int | None = None,
        batch_size: int = 50,
        eval_batch_size: int = 500,
        seed: int = 0,
    ) -> None:
        super().__init__(path, num_clients, min_samples, train_fraction, batch_size, eval_batch_size, seed)
        self.max_eval_samples = max_eval_samples

    def setup(self, stage: str) -> None:
        """Load, encode and split the text, unless that is done already."""
        if self.clients:
            return
        dataset = load_split(self.path)
        roles = Partition.from_values(dataset, arrow_column(dataset, "character_id"), self.min_samples)
        rng = np.random.default_rng(self.seed)
        chosen = self.choose_clients(rng, roles)
        x, y = arrow_column(dataset, "x"), arrow_column(dataset, "y")
        train, test = [], []
        for i in chosen:
            rows = roles.rows(i)
            cut = int(self.train_fraction * len(rows))
            train.append(rows[:cut])
            test.append(rows[cut + WINDOW - 1 :])
        held_out = np.concatenate(test)
        if self.max_eval_samples is not None and self.max_eval_samples < len(held_out):
            held_out = np.sort(rng.choice(held_out, self.max_eval_samples, replace=False))

        def tensors(rows: np.ndarray) -> TensorDataset:
            return TensorDataset(
                torch.from_numpy(encode(x.take(rows).to_pylist(), WINDOW)),
                torch.from_numpy(encode(y.take(rows).to_pylist(), 1)[:, 0].astype(np.int64)),
            )

        names = [str(roles.ids[i]) for i in chosen]
        self.clients = Partition.from_sizes(tensors(np.concatenate(train)), names, [len(rows) for rows in train])
        self.val_dataset = self.test_dataset = tensors(held_out)


def encode(texts: list[str], length: int) -> np.ndarray:
    """Encode texts of equal length as uint8 indices of symbols, one row per text.

    >>> encode(["a!", " }"], 2)
    array([[52,  1],
           [ 0, 78]], dtype=uint8)
    """
    table = np.full(256, 255, dtype=np.uint8)
    table[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS), dtype=np.uint8)
    text = "".join(texts)
    if len(text) != len(texts) * length or any(len(t) != length for t in texts):
        wrong = next(t for t in texts if len(t) != length)
        raise ConfigurationError(
            f"The text `{wrong}` has {len(wrong)} characters, not {length}.", "Give windows of equal length."
        )
    # A symbol outside ASCII becomes a byte that the table does not have.
    plain = text if text.isascii() else "".join(c if c.isascii() else "\x80" for c in text)
    codes = table[np.frombuffer(plain.encode("latin-1"), dtype=np.uint8)]
    if (codes == 255).any():
        symbol = text[int((codes == 255).argmax())]
        raise ConfigurationError(
            f"The text has the symbol {symbol!r}, which is not one of the {len(SYMBOLS)}.", "Remove or replace it."
        )
    return codes.reshape(len(texts), length)
