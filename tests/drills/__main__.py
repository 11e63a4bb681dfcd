import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from tests import drills
from tests.drills import KINDS, outcome, undisturbed


def in_turn(kinds, tries):
    """Each kind as often, with another seed each time."""
    for number in range(tries):
        yield kinds[number % len(kinds)], number


def at_random(kinds, hours, seed):
    """Kinds at random until the time is over, always the same ones with the same seed."""
    draw, end = random.Random(seed), time.monotonic() + 3600 * hours
    while time.monotonic() < end:
        yield draw.choice(kinds), draw.randrange(10**9)


def main():
    parser = argparse.ArgumentParser(description=drills.__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--hours", type=float, help="a soak for so long instead, with kinds and moments at random")
    parser.add_argument("--seed", type=int, default=0, help="of the soak")
    parser.add_argument("--only", nargs="+", choices=[kind.__name__ for kind in KINDS])
    options = parser.parse_args()
    # A forked process hangs if its parent has used more threads than one; each rank takes as many as it is to have.
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if options.only is None or kind.__name__ in options.only]
    tries = in_turn(kinds, options.tries) if options.hours is None else at_random(kinds, options.hours, options.seed)
    outcomes, start = Counter(), time.monotonic()
    # Who has seen enough of a soak still gets the table.
    with tempfile.TemporaryDirectory() as name, suppress(KeyboardInterrupt):
        folder = Path(name)
        expected = undisturbed(folder)
        for number, (kind, seed) in enumerate(tries):
            fault, found = kind.__name__.replace("_", " "), outcome(kind, seed, folder / str(number), expected)
            outcomes[fault, found] += 1
            if found.startswith("FAILED"):
                print(f"{fault}: {found}", flush=True)
            shutil.rmtree(folder / str(number), ignore_errors=True)
    width = max(len(fault) for fault, _ in outcomes)
    print(f"{'fault':{width}}  tries  outcome")
    for (fault, found), count in sorted(outcomes.items()):
        print(f"{fault:{width}}  {count:5}  {found}")
    failed = sum(count for (_, found), count in outcomes.items() if found.startswith("FAILED"))
    print(f"{sum(outcomes.values())} tries in {(time.monotonic() - start) / 60:.0f} min, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
