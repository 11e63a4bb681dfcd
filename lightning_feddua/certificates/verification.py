"""Whether a finished run is what its code, settings and data give: rounds are repeated, and certificates compared."""

from __future__ import annotations

import csv
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning import LightningModule

from lightning_feddua.callbacks.csv_log import CSVLog
from lightning_feddua.certificates.certificate import PARTS, differing
from lightning_feddua.checkpoints.files import LAST, read
from lightning_feddua.checkpoints.schema import engine_of
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.metric_names import CERTIFICATE
from lightning_feddua.wording import counted

if TYPE_CHECKING:
    from lightning_feddua.data.module import FederatedDataModule
    from lightning_feddua.loop import FederatedLoop


@dataclass
class Verification:
    """What came of it.

    Args:
        rounds: the rounds that were to be repeated.
        total: how many the run has.
        problems: what differs, in sentences; none if the run is verified.
    """

    rounds: list[int]
    total: int
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(["not verified:", *(f"  {problem}" for problem in self.problems)])
        listed = ", ".join(map(str, self.rounds))
        return f"verified: {'round' if len(self.rounds) == 1 else 'rounds'} {listed} of {self.total}"


@dataclass
class _Saved:
    """A checkpoint of the run: its file, how many rounds it has, and the engine that has run them."""

    path: Path
    rounds: int
    engine: str


def verify_run(
    loop: FederatedLoop,
    model: LightningModule,
    datamodule: FederatedDataModule | Any,
    run_dir: str | Path,
    rounds: int = 3,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Check all checkpoints of a run, repeat some of its rounds, and compare certificates.

    A round is repeated from the newest checkpoint before it, with all rounds between; where there is none, from the
    beginning. The number of ranks may be another than the run's.

    Args:
        loop: made with the arguments of the run; it is used up.
        model: a new one, made as for the run.
        datamodule: the data of the run.
        run_dir: its folder, with ``metrics.csv`` and checkpoints.
        rounds: how many rounds, chosen at random, are to be repeated.
        seed: of that choice.
        tell: is told what happens, line by line.
    """
    run_dir = Path(run_dir)
    rows = _read_rows(run_dir)
    certificates = [row[CERTIFICATE] for row in rows]
    total, wanted = len(certificates), loop.max_rounds
    saved, problems = _checkpoints(run_dir)
    chosen = sorted(random.Random(seed).sample(range(total), min(rounds, total)))
    found = Verification(chosen, total, problems)
    if saved:
        loop.engine = saved[-1].engine
    with tempfile.TemporaryDirectory(prefix="feddua_verify_") as folder:
        loop.out_dir = Path(folder)  # type: ignore[misc]
        for start, last in _replays(chosen, saved):
            tell(f"repeating {_rounds(0 if start is None else start.rounds, last)}")
            # The same rounds are validated as in the run.
            loop.max_rounds = max(total, wanted)
            loop._until = last + 1
            try:
                loop.fit(model, datamodule, None if start is None else start.path)
            except ConfigurationError as error:
                problems.append(str(error))
            else:
                problems += _differences(loop.run.certificates, certificates)
        for one in saved:
            tell(f"checking {one.path.name}")
            loop.max_rounds = max(total, one.rounds)
            try:
                loop.check(model, datamodule, one.path)
            except ConfigurationError as error:
                problems.append(str(error))
            else:
                problems += [f"`{one.path.name}`: {p}" for p in _differences(loop.run.certificates, certificates)]
                problems += _changed_rows(loop.history, rows) if one.path.name == LAST else []
    found.problems = list(dict.fromkeys(problems))
    if found.problems and loop.backend.depends_on_ranks:
        engine = loop.backend.engine_name
        found.problems.append(f"With the {engine} engine, bits depend on the number of ranks: use as many as the run.")
    return found


def _read_rows(run_dir: Path) -> list[dict[str, str]]:
    """What the run has logged, with the certificate of each round.

    Raises:
        ConfigurationError: it has none.
    """
    path = run_dir / CSVLog.FILE_NAME
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigurationError(f"`{path}` cannot be read: {error}.", "Give the folder of a run.") from error
    whole = [(row.get(CERTIFICATE) or "").count("-") == len(PARTS) - 1 for row in rows]
    if not rows or not all(whole):
        missing = "no rounds" if not rows else f"no certificate of round {whole.index(False)}"
        raise ConfigurationError(f"`{path}` has {missing}.", "Verify a run of this version, or of a later one.")
    return rows


def _changed_rows(history: list[dict[str, Any]], rows: list[dict[str, str]]) -> list[str]:
    """Where `metrics.csv` has other numbers than a checkpoint, in a sentence; none if it has the same."""
    for row, logged in zip(history, rows, strict=False):
        for name, value in row.items():
            text = logged.get(name)
            if text != ("" if value is None else str(value)):
                return [f"Round {row['round']} of `{CSVLog.FILE_NAME}` has `{name}` = {text}, and `{LAST}` {value}."]
    return []


def _checkpoints(run_dir: Path) -> tuple[list[_Saved], list[str]]:
    """The checkpoints of a run in order of rounds, and what is wrong with files that cannot be read."""
    saved, problems = [], []
    for path in sorted(run_dir.glob("*.ckpt")):
        try:
            state = read(path)["federated"]
            saved.append(_Saved(path, len(state["history"]), engine_of(state)))
        except ConfigurationError as error:
            problems.append(str(error))
    return sorted(saved, key=lambda one: one.rounds), problems


def _replays(chosen: list[int], saved: list[_Saved]) -> Iterator[tuple[_Saved | None, int]]:
    """From where to where rounds are to be repeated: from each start, up to the last round that is wanted."""
    last: dict[int, tuple[_Saved | None, int]] = {}
    for round in chosen:
        start = max((one for one in saved if one.rounds <= round), key=lambda one: one.rounds, default=None)
        last[0 if start is None else start.rounds] = (start, round)
    # The beginning first: it needs the model as it was made.
    yield from (last[rounds] for rounds in sorted(last))


def _differences(found: list[str], expected: list[str]) -> list[str]:
    """The first round that is not as expected, in a sentence; none if all are."""
    for round, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return [f"Round {round} differs in: {', '.join(differing(one, other))}."]
    return [] if len(found) <= len(expected) else [f"There is no certificate of round {len(expected)}."]


def _rounds(first: int, last: int) -> str:
    return f"round {first}" if first == last else f"rounds {first} to {last} ({counted(last - first + 1, 'round')})"
