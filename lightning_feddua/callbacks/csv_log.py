from __future__ import annotations

import csv
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.files import whole_file
from lightning_feddua.metric_names import CERTIFICATE

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class CSVLog(FederatedCallback):
    """Writes ``loop.history`` to ``metrics.csv`` in the run's folder, a line as soon as a round is over.

    The last column is the round's certificate, by which ``feddua verify`` tells whether the run can be repeated.
    """

    FILE_NAME = "metrics.csv"

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Bring the file of a resumed run to its last saved round."""
        if loop.history:
            self._write(loop)

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Append the round's row; a new column rewrites the file from the history."""
        self._write(loop)

    def _write(self, loop: FederatedLoop) -> None:
        if not loop.fabric.is_global_zero:
            return
        row = {**loop.history[-1], CERTIFICATE: loop.run.certificates[-1]}
        try:
            if self._file is None or not row.keys() <= set(self._columns):
                both = zip(loop.history, loop.run.certificates, strict=True)
                rows = [{**row, CERTIFICATE: certificate} for row, certificate in both]
                self._rewrite(loop.run_dir / self.FILE_NAME, rows)
            else:
                csv.DictWriter(self._file, self._columns).writerow(row)
            assert self._file is not None
            self._file.flush()
            loop.run.unsaved.pop(self.FILE_NAME, None)
        except OSError as error:
            # The history is in memory: the next round tries to write all of it.
            self._close()
            loop.run.unsaved[self.FILE_NAME] = problem = error.strerror or str(error)
            rank_zero_warn(f"`{self.FILE_NAME}` cannot be written: {problem}. The run continues.")

    def on_fit_end(self, loop: FederatedLoop) -> None:
        """Close the file, with whatever could not be written before."""
        if self.FILE_NAME in loop.run.unsaved:
            self._write(loop)
        self._close()

    def on_exception(self, loop: FederatedLoop, exception: BaseException) -> None:
        """Close the file; every finished round is in it."""
        self._close()

    def _rewrite(self, path: Path, rows: list[dict[str, Any]]) -> None:
        self._close()
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        self._columns.append(self._columns.pop(self._columns.index(CERTIFICATE)))
        with whole_file(path, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        self._file = path.open("a", newline="")

    def _close(self) -> None:
        if self._file is not None:
            # What could not be written before cannot be now.
            with suppress(OSError):
                self._file.close()
            self._file = None
