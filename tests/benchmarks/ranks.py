"""A rank of the variants that share a cohort over processes; torchrun starts it where there are several."""

import torch
import torch.distributed

from tests.benchmarks.variants import bare_loop, federated_loop
from tests.benchmarks.work import Work, runner_arguments


def main() -> None:
    arguments = runner_arguments(variant=["bare", "sequential", "vectorized"])
    torch.set_num_threads(arguments.threads)
    work = Work.load(arguments.work)
    rank, several = 0, arguments.processes > 1
    if several:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    if arguments.variant == "bare":
        timing = bare_loop(work, rank, arguments.processes)
    else:
        timing = federated_loop(arguments.variant)(work)
    if rank == 0:
        timing.report(arguments.update)
    if several:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
