from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.data.streams import UNKNOWN_SIZE
from lightning_feddua.files import whole_file

if TYPE_CHECKING:
    from lightning_feddua.aggregation.update import RoundUpdate
    from lightning_feddua.loop import FederatedLoop

_FIXED = ("round", "client", "samples")


class ClientLog(FederatedCallback):
    """Writes ``clients.csv`` in the run's folder: what each client of each round has logged in training, by name.

    ``samples`` is the client's number of samples, empty for a stream that does not tell. A client that failed and was
    skipped has a line with nothing but the round and its name. A resumed run continues the file after the rounds of
    its checkpoint, in a new folder with a copy of the lines before.
    """

    FILE_NAME = "clients.csv"

    def __init__(self) -> None:
        self._columns = list(_FIXED)
        self._cohort: list[int] = []
        self._rows: list[dict[str, float] | None] = []
        # Where the lines of earlier rounds are.
        self._folder: str | None = None

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Begin a file, with the lines of the rounds that a resumed run has behind it."""
        self._columns = list(_FIXED)
        if loop.fabric.is_global_zero:
            before = Path(self._folder or loop.run_dir) / self.FILE_NAME
            lines = _read(before, len(loop.history)) if loop.history else []
            if loop.history and not lines:
                rank_zero_warn(f"`{before}` does not have the earlier rounds: `{self.FILE_NAME}` begins with this one.")
            self._write(loop, lines, whole=True)
        self._folder = str(loop.run_dir)

    def on_round_start(self, loop: FederatedLoop, round: int, cohort: list[int]) -> None:
        """Remember who takes part."""
        self._cohort, self._rows = cohort, []

    def on_aggregate_end(self, loop: FederatedLoop, update: RoundUpdate) -> None:
        """Remember what the clients have logged."""
        self._rows = update.client_rows

    def on_round_end(self, loop: FederatedLoop, round: int) -> None:
        """Append a line for each client, in the order of the cohort; on rank 0."""
        if not loop.fabric.is_global_zero:
            return
        lines: list[dict[str, Any]] = []
        for place, client in enumerate(self._cohort):
            logged = (self._rows[place] if place < len(self._rows) else None) or {}
            own = {name: value for name, value in logged.items() if name != "samples" or value != UNKNOWN_SIZE}
            lines.append({"round": round, "client": str(loop.client_ids[client]), **own})
        self._write(loop, lines)

    def state_dict(self) -> dict[str, Any]:
        """Where the lines of earlier rounds are: they are not worth copying into every checkpoint."""
        return {"folder": self._folder}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after these lines."""
        self._folder = state["folder"]

    def _write(self, loop: FederatedLoop, lines: list[dict[str, Any]], whole: bool = False) -> None:
        """Append lines, or write the whole file where that is asked for, or where there is a new column."""
        path = loop.run_dir / self.FILE_NAME
        new = dict.fromkeys(name for line in lines for name in line if name not in self._columns)
        try:
            if new and not whole:
                lines, whole = [*_read(path, loop.run.round), *lines], True
            self._columns += new
            if whole:
                with whole_file(path, "w", newline="") as file:
                    writer = csv.DictWriter(file, self._columns)
                    writer.writeheader()
                    writer.writerows(lines)
            else:
                with path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns).writerows(lines)
        except OSError as error:
            rank_zero_warn(f"`{self.FILE_NAME}` cannot be written: {error.strerror or error}. The run continues.")


def _read(path: Path, rounds: int) -> list[dict[str, Any]]:
    """The lines of the first rounds; a line that was cut off by the end of a process is not one of them."""
    if not path.exists():
        return []
    text = path.read_bytes().decode()
    lines = csv.DictReader(StringIO(text[: text.rfind("\n") + 1], newline=""))
    return [{k: v for k, v in line.items() if v != ""} for line in lines if int(line["round"]) < rounds]
