from torch import Tensor, nn

from lightning_feddua.models.classifier import Classifier


class CharLSTM(Classifier):
    """The next character after a window of text, 1,093,199 parameters with 79 symbols.

    Two layers: that is what the parameter count in the paper's table says.

    Args:
        num_classes: the number of symbols.
        hidden: the width of the embedding and of the LSTM.
        layers: the number of LSTM layers.
        dropout: on the last hidden state.
        lr: the local learning rate.
        weight_decay: coupled weight decay.
    """

    def __init__(
        self,
        num_classes: int = 79,
        hidden: int = 256,
        layers: int = 2,
        dropout: float = 0.5,
        lr: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(_CharLSTM(num_classes, hidden, layers, dropout), num_classes, lr, weight_decay)
        self.save_hyperparameters()


class _CharLSTM(nn.Module):
    def __init__(self, symbols: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(hidden, symbols)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(x.long()))
        return self.dense(self.dropout(outputs[:, -1]))
