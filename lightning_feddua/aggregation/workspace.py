"""Memory as large as the model that several parts of a round need, one after another."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Lends one vector, made when it is first asked for, to one borrower at a time.

    What the last borrower left in it is nobody's: a borrower writes before it reads.

    Args:
        like: gives size, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._vector: Tensor | None = None
        self._borrower: str | None = None

    def lend(self, borrower: str) -> Tensor:
        """The vector, until the borrower gives it back."""
        assert self._borrower is None, f"{borrower} asked for memory that {self._borrower} has"
        self._borrower = borrower
        if self._vector is None:
            self._vector = torch.empty_like(self._like)
        return self._vector

    def give_back(self, borrower: str) -> None:
        """End a loan; nothing happens without one."""
        if self._borrower == borrower:
            self._borrower = None

    def reclaim(self) -> None:
        """End whatever loan there is: the borrower has failed."""
        self._borrower = None
