"""Faults on purpose: ``python -m tests.drills --tries 200`` tries many kinds at random moments and prints a table.

No fault may lose a finished round, hang beyond its timeout, or end a process without a message.
"""

import random

from tests.drills import clients, files, processes
from tests.drills.drill import Drill, arguments
from tests.forked_ranks import run
from tests.modules import DropoutCNN

KINDS = [
    processes.kill_between_rounds,
    processes.kill_inside_a_client,
    processes.kill_during_a_save,
    processes.kill_in_the_all_reduce,
    processes.sigterm,
    processes.stopped_rank,
    processes.two_runs_at_once,
    processes.clock_jumps,
    files.full_disk,
    files.folder_that_cannot_be_written,
    files.truncated_checkpoint,
    files.flipped_bit,
    files.damaged_everywhere,
    clients.changed_data,
    clients.nan_update,
    clients.inf_update,
    clients.exception_in_a_dataset,
    clients.failures_at_random,
]


def undisturbed(folder):
    return run(1, folder / "undisturbed", DropoutCNN, arguments())


def attempt(kind, seed, folder, expected):
    """Try one fault, and say what came of it."""
    folder.mkdir(parents=True)
    return kind(Drill(folder, random.Random(f"{kind.__name__} {seed}"), expected))
