"""The history of a run in its checkpoints: as text, of which only what is new is written at each save."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# What is the same after a way through JSON.
_EXACT = (bool, int, float, str, type(None))


class HistoryText:
    """Turns a history into text, and remembers that of the rounds before.

    A run saves after every round, and its history grows with each: what is done for every row must be next to nothing.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._text = bytearray()
        # Where each row ends in the text.
        self._ends: list[int] = []

    def encode(self, history: list[dict[str, Any]], plain: Callable[[Any], Any]) -> dict[str, Any]:
        """A history as one tensor of bytes, a line of JSON for each row.

        Args:
            history: the rows. Callbacks may have changed those that were encoded before.
            plain: makes a row of what a checkpoint can hold.
        """
        same = min(len(history), len(self._rows))
        if history[:same] != self._rows[:same]:
            same = next(i for i in range(same) if history[i] != self._rows[i])
        del self._rows[same:], self._ends[same:]
        # Made anew, because the tensor of an earlier call may still show it.
        text = self._text[: self._ends[-1] if self._ends else 0]
        others = {}
        for index, row in enumerate(history[same:], same):
            exact = all(type(key) is str and type(value) in _EXACT for key, value in row.items())
            text += json.dumps(row).encode() + b"\n" if exact else b"\n"
            self._ends.append(len(text))
            self._rows.append(dict(row) if exact else {})
            if not exact:
                others[index] = plain(row)
        self._text = text
        shown = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        return {"rows": len(history), "text": shown, "others": others}


def decode(saved: Any) -> list[dict[str, Any]]:
    """The rows of a saved history, of this format or the one before.

    Raises:
        ValueError: it is not as it was written.
    """
    if isinstance(saved, list):
        rows = saved
    else:
        text, others = saved["text"], saved["others"]
        if not isinstance(text, Tensor) or text.dtype != torch.uint8 or text.dim() != 1:
            raise ValueError("its text is none")
        lines = text.numpy().tobytes().split(b"\n")[:-1]
        if type(saved["rows"]) is not int or len(lines) != saved["rows"] or not isinstance(others, dict):
            raise ValueError("it is cut short")
        rows = [json.loads(line) if line else others[index] for index, line in enumerate(lines)]
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or type(row.get("round")) is not int or row["round"] != index:
            raise ValueError(f"there is no row of round {index}")
    return rows
