import argparse
import tempfile
from collections import Counter
from pathlib import Path

from tests import drills
from tests.drills import KINDS, attempt, undisturbed


def main():
    parser = argparse.ArgumentParser(description=drills.__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--only", choices=[kind.__name__ for kind in KINDS])
    options = parser.parse_args()
    outcomes = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = undisturbed(folder)
        kinds = [kind for kind in KINDS if options.only in (None, kind.__name__)]
        for i in range(options.tries):
            kind = kinds[i % len(kinds)]
            try:
                outcome = attempt(kind, i, folder / str(i), expected)
            except Exception as error:
                outcome = f"FAILED (seed {i}): {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            outcomes[kind.__name__.replace("_", " "), outcome] += 1
    width = max(len(fault) for fault, _ in outcomes)
    print(f"{'fault':{width}}  tries  outcome")
    for (fault, outcome), count in sorted(outcomes.items()):
        print(f"{fault:{width}}  {count:5}  {outcome}")
    failed = sum(count for (_, outcome), count in outcomes.items() if outcome.startswith("FAILED"))
    print(f"{options.tries} tries, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
