"""Rounds under FedJAX: its federated averaging with the jit backend."""

import os
import sys
import time

# XLA reads this when it starts: one thread, or as many as there are cores.
if "--threads=1" in sys.argv:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax

# FedJAX 0.0.17, its last release, calls a function by a name that JAX has since dropped.
jax.tree_map = jax.tree_util.tree_map

import fedjax
import optax
from fedjax.algorithms import fed_avg

from tests.benchmarks.peers.fedjax_models import LOSSES, flatten, unflatten
from tests.benchmarks.work import Timing, Work, runner_arguments


def main() -> None:
    arguments = runner_arguments()
    work = Work.load(arguments.work)
    loss = LOSSES[work.task]

    def gradient(params, batch, rng):
        return jax.grad(loss)(params, batch["x"], batch["y"])

    sgd = optax.chain(optax.add_decayed_weights(work.weight_decay), optax.sgd(work.lr))
    algorithm = fed_avg.federated_averaging(
        gradient,
        fedjax.optimizers.create_optimizer_from_optax(sgd if work.weight_decay else optax.sgd(work.lr)),
        fedjax.optimizers.sgd(learning_rate=1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch_size, num_epochs=1, skip_shuffle=True),
    )
    start = unflatten(work.task, work.weights)
    state, seconds = algorithm.init(start), []
    for round in range(work.rounds):
        begin = time.perf_counter()
        clients = []
        for position, rng in enumerate(jax.random.split(jax.random.PRNGKey(round), work.cohort_size)):
            rows = work.client_rows(round, position)
            data = fedjax.ClientDataset({"x": work.inputs[rows], "y": work.targets[rows]})
            clients.append((position, data, rng))
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - begin)
        if round == 0:
            update = flatten(work.task, state.params) - flatten(work.task, start)
    Timing(seconds, update).report(arguments.update)


if __name__ == "__main__":
    main()
