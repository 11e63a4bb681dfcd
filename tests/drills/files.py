"""Faults of files: full disks, folders that cannot be written, damaged checkpoints."""

import re
import resource
from pathlib import Path

from lightning_feddua import FederatedCallback
from tests.checkpoints.checkpointed_runs import rewrite
from tests.checkpoints.test_tampered import change
from tests.drills.drill import ROUNDS, SECONDS
from tests.forked_ranks import assert_same


def full_disk(drill):
    first = drill.draw.randrange(1, ROUNDS - 1)

    class Fill(FederatedCallback):
        def on_round_start(self, round):
            limit = 3000 if round in (first, first + 1) else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        def on_fit_end(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    last = drill.draw.randint(first + 1, ROUNDS)
    ranks = drill.start(Fill(), max_rounds=last)
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    assert "could not be saved" in ranks.output(0)
    drill.recover()
    return "a warning; went on to the same bits"


def full_disk_to_the_end(drill):
    first = drill.draw.randrange(ROUNDS)

    class Fill(FederatedCallback):
        def on_round_start(self, round):
            if round == first:
                resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))

    ranks = drill.fail(Fill())
    outputs = [ranks.output(rank) for rank in range(len(ranks.pids))]
    assert set(ranks.codes) == {1}, outputs
    assert all("but not all of it could be saved" in output for output in outputs), outputs
    drill.finish()
    return "an error after the last round; went on to the same bits"


def full_disk_of_client_states(drill):
    at, world_size = drill.draw.randrange(ROUNDS), drill.draw.randint(1, 3)
    full = drill.draw.randrange(world_size)

    class Fill(FederatedCallback):
        def on_client_end(self, loop, round):
            if (loop.fabric.global_rank, round) == (full, at):
                # Less than what one client keeps, and enough for messages.
                resource.setrlimit(resource.RLIMIT_FSIZE, (15000, resource.RLIM_INFINITY))

    ranks = drill.fail(Fill(), world_size=world_size, client_states="disk")
    outputs = [ranks.output(rank) for rank in range(world_size)]
    assert set(ranks.codes) == {1}, outputs
    assert "What clients keep cannot be written" in outputs[full], outputs
    return f"a message; {drill.recover()}"


def folder_that_cannot_be_written(drill):
    blocked = drill.folder / "file"
    blocked.write_text("")
    drill.out_dir = drill.draw.choice([blocked, blocked / "runs", Path("/proc/runs")])
    ranks = drill.start(ckpt_path=None)
    assert set(ranks.wait(SECONDS)) == {1}
    assert "cannot be written" in ranks.output(0)
    return "refused in a sentence"


def truncated_checkpoint(drill):
    last = drill.saved_run(drill.draw.randint(2, ROUNDS - 1)) / "last.ckpt"
    content = last.read_bytes()
    last.write_bytes(content[: drill.draw.randrange(len(content))])
    ranks = drill.finish()
    assert "Looking for an older one" in ranks.output(0)
    return "an older one is used; went on to the same bits"


def flipped_bit(drill):
    last = drill.saved_run(drill.draw.randint(2, ROUNDS - 1)) / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[drill.draw.randrange(len(content))] ^= 1 << drill.draw.randrange(8)
    last.write_bytes(content)
    # A bit that means nothing, such as one of a date, may pass; the result is the same.
    noticed = "Looking for an older one" in drill.finish().output(0)
    return "an older one is used; went on to the same bits" if noticed else "harmless; went on to the same bits"


def damaged_everywhere(drill):
    run_dir = drill.saved_run(2)
    for path in run_dir.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:100])
    ranks = drill.start()
    assert set(ranks.wait(SECONDS)) == {1}
    assert "Every checkpoint in" in ranks.output(0)
    return "refused in a sentence"


def tampered_checkpoint(drill):
    path = drill.saved_run(drill.draw.randint(2, ROUNDS - 1)) / "last.ckpt"
    done = []
    try:
        # By somebody who makes the file's own digest fit again.
        rewrite(path, lambda checkpoint: done.append(change(checkpoint, drill.draw)))
    except (KeyError, TypeError, AttributeError):
        return "nothing is left that could be saved"
    ranks = drill.start(ckpt_path=path)
    codes = ranks.wait(SECONDS)
    if any(codes):
        assert set(codes) == {1}, codes
        outputs = [ranks.output(rank) for rank in range(len(codes))]
        said = re.compile(rf"(?:Configuration|Damaged)Error: .*{re.escape(str(path))}.*\.\n")
        assert all(said.search(output) for output in outputs), (done, outputs)
        return "refused in a sentence that names the file"
    assert_same(drill.result(), drill.expected)
    return "harmless; went on to the same bits"
