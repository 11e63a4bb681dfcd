"""Faults of files: full disks, folders that cannot be written, damaged checkpoints."""

import resource
from pathlib import Path

from lightning_feddua import FederatedCallback
from tests.drills.drill import ROUNDS, SECONDS


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
