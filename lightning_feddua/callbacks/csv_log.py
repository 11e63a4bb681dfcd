from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightning_feddua.callbacks.base import FederatedCallback

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class CSVLog(FederatedCallback):
    """Writes ``loop.history`` to ``metrics.csv`` in the run's folder, a line as soon as a round is over."""

    FILE_NAME = "metrics.csv"

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Append the round's row; a new column rewrites the file from the history."""
        if not loop.fabric.is_global_zero:
            return
        row = loop.history[-1]
        if self._file is None or not row.keys() <= set(self._columns):
            self._rewrite(loop.run_dir / self.FILE_NAME, loop.history)
        else:
            csv.DictWriter(self._file, self._columns).writerow(row)
        assert self._file is not None
        self._file.flush()

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Close the file."""
        self._close()

    def on_exception(self, loop: FederatedLoop, exception: BaseException) -> None:
        """Close the file; every finished round is in it."""
        self._close()

    def _rewrite(self, path: Path, history: list[dict[str, Any]]) -> None:
        self._close()
        self._columns = list(dict.fromkeys(name for row in history for name in row))
        self._file = path.open("w", newline="")
        writer = csv.DictWriter(self._file, self._columns)
        writer.writeheader()
        writer.writerows(history)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
