"""Time a round: ``python -m tests.benchmarks linear mlp`` prints a Markdown table of medians.

Every variant does the same work (cohort, minibatches, steps); first their updates are compared, then they are timed in
turn, and medians are reported with their ratio to a bare torch loop of the same steps. ``overhead`` tells where the
time of a round goes, ``skew`` how evenly ranks share unequal clients, ``scaling`` how the time of a round grows with
clients, ranks, population and parameters. ``choice`` tells how good ``engine="auto"`` is for ten combinations of
module, sizes and work, ``epochs`` for the first of them, and ``prediction`` fits the constants of that choice.
``startup`` tells how long a command takes to start, ``sweep`` how long many short runs take. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.choice import COMBINATIONS, EPOCHS, choice_table, measure_all
from tests.benchmarks.many_runs import sweep_table
from tests.benchmarks.overhead import overhead_table, skew_table
from tests.benchmarks.peers.environments import PEERS, default_folder
from tests.benchmarks.prediction import prediction_table
from tests.benchmarks.report import Row, plot_ratios, ratio_table
from tests.benchmarks.rounds import BARE, measure, variants
from tests.benchmarks.scaling import scaling_tables
from tests.benchmarks.starts import startup_table
from tests.benchmarks.tasks import ROUND_TASKS, TASKS

REPORTS = ("overhead", "skew", "scaling", "choice", "epochs", "prediction", "startup", "sweep")


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "what", nargs="*", default=["linear"], choices=[*ROUND_TASKS, *REPORTS, []], help="tasks or reports"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="how often the variants take turns")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds in each turn")
    parser.add_argument("--steps", type=int, help="local steps of a client, instead of the task's own")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument(
        "--processes", type=int, default=1, help="also time so many processes that share the cohort and the threads"
    )
    parser.add_argument(
        "--peers", nargs="*", default=[], choices=[*PEERS, "all", []], help="other frameworks, installed when needed"
    )
    parser.add_argument("--venvs", type=Path, default=default_folder(), help="where the peers are installed")
    parser.add_argument(
        "--only", default="", help="time only the bare loop and variants whose labels match this regular expression"
    )
    parser.add_argument("--compile", action="store_true", help="also time compiled local steps")
    parser.add_argument("--plot", type=Path, help="also draw the ratios, into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    peers = list(PEERS) if "all" in arguments.peers else arguments.peers
    venvs = arguments.venvs.expanduser().absolute()
    candidates = variants(arguments.threads, arguments.processes, peers, venvs, arguments.compile)
    candidates = {name: run for name, run in candidates.items() if name == BARE or re.search(arguments.only, name)}
    steps = {} if arguments.steps is None else {"steps": arguments.steps}
    tasks = {name: replace(task, **steps) for name, task in TASKS.items()}
    tables: dict[str, Sequence[Row]] = {}
    for name in arguments.what:
        if name == "overhead":
            print("\nParts of a round, medians in ms\n")
            rows = [(tasks[task], engine, 1) for task in ("linear", "cnn") for engine in ("sequential", "vectorized")]
            print(overhead_table([*rows, (tasks["cnn"], "sequential", 2)], arguments.rounds), flush=True)
        elif name == "skew":
            print(
                f"\nOne client ten times the others, two ranks, one epoch\n\n{skew_table(arguments.rounds)}", flush=True
            )
        elif name == "scaling":
            for title, table in scaling_tables(arguments.rounds):
                print(f"\n{title}\n\n{table}", flush=True)
        elif name == "prediction":
            print(f"\nStacks against one by one, {arguments.threads} threads\n", flush=True)
            print(prediction_table(arguments.repetitions, arguments.rounds), flush=True)
        elif name in ("choice", "epochs"):
            print(f"\nThe choice of an engine, {arguments.threads} threads\n", flush=True)
            names = [EPOCHS] if name == "epochs" else list(COMBINATIONS)
            print(choice_table(measure_all(arguments.repetitions, arguments.rounds, names)), flush=True)
        elif name == "startup":
            print(f"\nStart of a process, medians of {arguments.repetitions}\n", flush=True)
            print(startup_table(arguments.repetitions), flush=True)
        elif name == "sweep":
            print(f"\nMany short runs, two at once, medians of {arguments.repetitions}\n", flush=True)
            print(sweep_table(arguments.repetitions), flush=True)
        else:
            tables[name] = measure(tasks[name], candidates, arguments.repetitions, arguments.rounds)
            timed = f"medians of {arguments.repetitions} x {arguments.rounds} rounds"
            print(f"\n{name}, {arguments.threads} threads, {timed}\n\n{ratio_table(tables[name])}", flush=True)
    if arguments.plot and tables:
        plot_ratios(tables, arguments.plot)


if __name__ == "__main__":
    main()
