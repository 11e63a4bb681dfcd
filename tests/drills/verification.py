"""Whether a stranger can verify a run, and finds a changed bit in any of its files."""

import torch

from lightning_feddua.certificates.verification import verify_run
from tests.checkpoints.checkpointed_runs import rewrite
from tests.checkpoints.test_tampered import entry, places
from tests.drills.drill import ROUNDS, SECONDS, arguments
from tests.forked_ranks import make_loop, unequal_clients
from tests.modules import BatchNormCNN

_MANTISSA = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52), torch.int64: (torch.int64, 63)}


def verified(drill, run_dir):
    """What ``verify_run`` says of a run, on any number of ranks."""
    rounds, seed = drill.draw.randint(1, 2), drill.draw.randrange(100)

    def verify():
        torch.manual_seed(0)
        loop, model = make_loop(drill.out_dir, arguments()), BatchNormCNN()
        found = verify_run(loop, model, unequal_clients(), run_dir, rounds, seed)
        print(found, flush=True)
        raise SystemExit(1 if found.problems else 0)

    return drill.ranks(verify)


def untouched_run(drill):
    run_dir = drill.saved_run(ROUNDS)
    ranks = verified(drill, run_dir)
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    assert "verified: round" in ranks.output(0)
    return "verified, on any number of ranks"


def flipped_bit_of_a_saved_round(drill):
    run_dir = drill.saved_run(ROUNDS)
    path = drill.draw.choice(sorted(run_dir.glob("*.ckpt")))

    def flip(checkpoint):
        tensors = [entry(checkpoint, where) for where in places(checkpoint)]
        tensors = [one for one in tensors if isinstance(one, torch.Tensor) and one.numel() and one.dtype in _MANTISSA]
        tensor = drill.draw.choice(tensors)
        kind, bits = _MANTISSA[tensor.dtype]
        word = torch.tensor(1 << drill.draw.randrange(bits), dtype=kind)
        flat = tensor.contiguous().view(kind).view(-1)
        flat[drill.draw.randrange(len(flat))] ^= word
        tensor.copy_(flat.view(tensor.dtype).view_as(tensor))

    # By somebody who makes the file's own digest fit again.
    rewrite(path, flip)
    ranks = verified(drill, run_dir)
    assert all(ranks.wait(SECONDS)), "nothing was found"
    assert "not verified:" in ranks.output(0)
    assert path.name in ranks.output(0), ranks.output(0)
    return "found, the file is named"
