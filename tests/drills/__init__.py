"""Faults on purpose: ``python -m tests.drills --tries 300`` tries many kinds at random moments and prints a table.

No fault may lose a finished round, end with a wrong result as if all were well, hang beyond its timeout, or end without
a message.
"""

import random
import traceback

import torch

from tests.drills import clients, disagreements, files, leftovers, moments, processes, verification
from tests.drills.drill import CORES, Drill, arguments
from tests.forked_ranks import ForkedRanks, fit
from tests.modules import BatchNormCNN

KINDS = [
    processes.kill_between_rounds,
    processes.kill_inside_a_client,
    processes.kill_between_the_files,
    processes.kill_in_the_all_reduce,
    processes.sigterm,
    processes.two_runs_at_once,
    processes.clock_jumps,
    moments.rank_killed_at_any_moment,
    moments.rank_stopped_at_any_moment,
    moments.sigterm_at_any_moment,
    moments.ctrl_c_at_any_moment,
    moments.error_of_one_rank,
    disagreements.another_seed,
    disagreements.another_number_of_steps,
    disagreements.another_learning_rate,
    disagreements.other_data,
    disagreements.another_order_of_clients,
    disagreements.flipped_bit_of_weights,
    disagreements.flipped_bit_of_buffers,
    disagreements.flipped_bit_of_the_server,
    disagreements.flipped_bit_of_the_average,
    files.full_disk,
    files.full_disk_to_the_end,
    files.full_disk_of_client_states,
    files.folder_that_cannot_be_written,
    files.truncated_checkpoint,
    files.flipped_bit,
    files.damaged_everywhere,
    files.tampered_checkpoint,
    clients.changed_data,
    clients.nan_update,
    clients.inf_update,
    clients.sample_of_1e25,
    clients.sum_that_overflows,
    clients.exception_in_a_dataset,
    clients.failures_at_random,
    clients.lazily_made_data_that_raises,
    clients.data_worker_killed,
    clients.data_that_hangs_once,
    clients.data_that_hangs_for_ever,
    leftovers.left_over_state,
    verification.untouched_run,
    verification.flipped_bit_of_a_saved_round,
]


def undisturbed(folder):
    """The result of a run in one process with all cores."""

    def run():
        torch.set_num_threads(CORES)
        fit(folder, BatchNormCNN, arguments())

    ranks = ForkedRanks(run, 1, folder)
    assert not any(ranks.wait(120)), ranks.output(0)
    return torch.load(folder / "result.pt", weights_only=True)


def attempt(kind, seed, folder, expected):
    """Try one fault, and say what came of it."""
    folder.mkdir(parents=True)
    return kind(Drill(folder, random.Random(f"{kind.__name__} {seed}"), expected))


def outcome(kind, seed, folder, expected):
    """The same, with a failure as an outcome like any other."""
    try:
        return attempt(kind, seed, folder, expected)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        return f"FAILED (seed {seed}): {type(error).__name__} in {where.name}, line {where.lineno}: {text[-500:]}"
