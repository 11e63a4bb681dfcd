"""Every private name of other packages that this package uses, each behind a function or an alias.

Private names may change in any release: ``tests/test_private_*.py`` have a canary for each, which fails if the name is
gone or does something else. A new version of torch or Lightning can be allowed once all canaries pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchmetrics import Metric

from lightning_feddua.lightning_names import is_module, package_of

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

# Where a module keeps its tensors and children; these are not attributes of a user's own.
MODULE_REGISTRIES = PARAMETERS, BUFFERS, SUBMODULES = ("_parameters", "_buffers", "_modules")
NO_BATCHING_RULE = "Batching rule not implemented"  # how vmap's error for an unknown operation begins


def zero_all(tensors: Sequence[Tensor]) -> None:
    """Set many tensors to zero in one call."""
    torch._foreach_zero_(list(tensors))


def add_all(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to many tensors, in place, in one call."""
    torch._foreach_add_(list(tensors), list(others))


def copy_all(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy into many tensors in one call."""
    torch._foreach_copy_(list(tensors), list(sources))


def version_of(tensor: Tensor) -> int:
    """A count that grows with each change of a tensor in place, through any of its views."""
    return tensor._version


def recomputed_attributes(module: torch.nn.Module) -> list[str]:
    """The attributes that hooks of ``spectral_norm`` and the like compute anew before each forward pass."""
    names = [getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()]
    return [name for name in names if isinstance(name, str)]


def metadata_of(state_dict: Mapping[str, Any]) -> Any:
    """The versions of modules that a state dict carries in an attribute; None if it has none, or OmegaConf's own."""
    found = getattr(state_dict, "_metadata", None)
    return found if isinstance(found, Mapping) else None


def set_metadata(state_dict: MutableMapping[str, Any], metadata: Any) -> None:
    """Attach the versions of modules to a copy of a state dict."""
    state_dict._metadata = metadata  # type: ignore[attr-defined]


def default_store() -> Any:
    """The key-value store of the default process group, to tell which ranks have come to an exchange."""
    return torch.distributed.distributed_c10d._get_default_store()


def lone_group() -> Any:
    """A process group with this rank alone in it, of the default group's backend. No other rank needs to call this."""
    group = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    # As the default group it is the whole world, and its only rank is number 0 there.
    torch.distributed.distributed_c10d._world.pg_group_ranks[group] = {0: 0}
    return group


@contextmanager
def in_place_of_the_world(group: Any) -> Iterator[None]:
    """Make a group torch's default process group for a while."""
    torch_c10d = torch.distributed.distributed_c10d
    world = torch_c10d.GroupMember.WORLD
    torch_c10d._update_default_pg(group)
    try:
        yield
    finally:
        torch_c10d._update_default_pg(world)


def end_workers(loader: Any, at_once: bool = False) -> None:
    """End the worker processes of a DataLoader, if it has started any; at once, whatever they are doing."""
    if loader._iterator is not None:
        for worker in loader._iterator._workers if at_once else ():
            worker.kill()
        loader._iterator._shutdown_workers()


def forget_workers(loader: Any) -> None:
    """Keep torch from raising an error in whatever this process does when a worker dies; the next batch tells, too."""
    if loader._iterator._worker_pids_set:
        torch._C._remove_worker_pids(id(loader._iterator))
        loader._iterator._worker_pids_set = False


def batches_read(value: object) -> int | None:
    """How many batches an iterator over a DataLoader has given; None for anything else."""
    return value._num_yielded if isinstance(value, _BaseDataLoaderIter) else None


# What the compiler needs is imported where it is used: it costs more than all the rest of the package.
def compile_session() -> AbstractContextManager[Any]:
    """What surrounds one compilation, so that nothing of it leaks into the next."""
    return torch.compiler._compile_session_context()


def trace(function: Callable[..., Any], examples: Sequence[Tensor]) -> torch.fx.GraphModule:
    """The tensor operations of a function as a graph. Tensors that the function closes over become constants."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)


def compile_graph(
    graph: torch.fx.GraphModule, examples: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a traced graph for inputs of exactly these shapes; the compiler's cache on disk is used."""
    import torch._inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # With an environment for shapes, although none varies: without one the compiler does not use its cache on disk.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with tracing(TracingContext(mode)):
        fakes: list[Any] = [mode.from_tensor(example, static_shapes=True) for example in examples]
        return torch._inductor.compile(graph, fakes, options=options)


# Options of the compiler: random numbers as eager code draws them; compute what is stored and read again only once.
EAGER_RANDOM_NUMBERS: dict[str, Any] = {"fallback_random": True}
STORED_VALUES_ARE_READ: dict[str, Any] = {"realize_reads_threshold": 1}
# The loggers that report on the compiler's own progress, and on errors of a trace, which are raised anyway.
COMPILER_LOGGER, TRACER_LOGGER = "torch._inductor", "torch._subclasses.fake_tensor"
COMPILER_MODULES = ("torch._inductor.compile_fx", "torch._inductor.codegen.cpp")  # what takes a second to import


def threads_option(threads: int) -> dict[str, Any]:
    """The compiler's option for a number of threads."""
    return {"cpp.threads": threads}


def starts_processes(strategy: Any) -> bool:
    """Whether a strategy runs functions in processes that it starts, as ``ddp_fork`` does."""
    return isinstance(strategy.launcher, _MultiProcessingLauncher)


def start_method(strategy: Any) -> str | None:
    """``"popen"``, ``"fork"``, ``"spawn"`` or ``"forkserver"``; None for a strategy that starts no processes."""
    return getattr(strategy, "_start_method", None)


def process_group_timeout(strategy: Any) -> timedelta | None:
    """How long ranks wait for each other; None for a strategy without a process group."""
    return getattr(strategy, "_timeout", None)


def set_process_group_timeout(strategy: Any, timeout: timedelta) -> None:
    """Set it before the process group is created."""
    strategy._timeout = timeout


def process_group_backend(strategy: Any) -> str:
    """The backend that a strategy would create its process group with, such as ``"gloo"``."""
    return strategy._get_process_group_backend()


# What LightningModule asks its trainer for, and `TrainerView` answers: in `self.log`, and in `self.optimizers()`.
TRAINER_RESULTS, STRATEGY_OPTIMIZERS = "_results", "_lightning_optimizers"
# The parts of a Trainer that some modules reach into.
TRAINER_CONNECTORS = (
    *("_data_connector", "_accelerator_connector", "_logger_connector"),
    *("_callback_connector", "_checkpoint_connector", "_signal_connector"),
)


def trainer_of(owner: LightningModule | LightningDataModule) -> Any:
    """The trainer that is attached, or None; a module's public property raises an error instead."""
    return owner._trainer if is_module(owner) else owner.trainer


def hparams_name(module: LightningModule) -> str | None:
    """The name of the one argument that holds all hyperparameters, where there is such; checkpoints keep it."""
    return getattr(module, "_hparams_name", None)


def logs_hparams(owner: LightningModule | LightningDataModule) -> bool:
    """Whether its hyperparameters are for loggers too, which ``save_hyperparameters(logger=False)`` forbids."""
    return getattr(owner, "_log_hyperparams", False)


def _optimizer_tools(module: LightningModule) -> Any:
    """What Trainer makes of a module's optimizers, in the package that the module is of."""
    return import_module(f"{package_of(module)}.core.optimizer")


def parse_optimizers(configured: Any, module: LightningModule) -> tuple[list[Optimizer], list[Any], str | None]:
    """Optimizers, schedulers and the monitored metric, from any shape that ``configure_optimizers`` may return."""
    return _optimizer_tools(module)._configure_optimizers(configured)


def parse_schedulers(schedulers: list[Any], monitor: str | None, module: LightningModule) -> list[Any]:
    """Schedulers with their intervals, checked as Trainer checks them."""
    tools = _optimizer_tools(module)
    if module.automatic_optimization:
        configs = tools._configure_schedulers_automatic_opt(schedulers, monitor)
    else:
        configs = tools._configure_schedulers_manual_opt(schedulers)
    tools._validate_scheduler_api(configs, module)
    return configs


def wrap_optimizer(optimizer: Optimizer, strategy: Any, module: LightningModule) -> Any:
    """An optimizer whose ``step`` calls ``strategy.optimizer_step``; the strategy must be kept alive elsewhere."""
    return _optimizer_tools(module).LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def checkpoint_triggers(callback: Any) -> tuple[int, timedelta | None]:
    """After how many steps, and after how much time, a ModelCheckpoint saves; 0 and None for neither."""
    return callback._every_n_train_steps, callback._train_time_interval


def version_is_open(logger: Any) -> bool:
    """Whether a logger has not yet chosen its version."""
    return getattr(logger, "_version", "") is None


def set_version(logger: Any, version: int | str | None) -> None:
    """Let a logger write where an earlier one did."""
    logger._version = version


def is_opened(logger: Any) -> bool:
    """Whether a CSVLogger or a TensorBoardLogger has begun to write."""
    return logger._experiment is not None


def reopen(logger: Any) -> None:
    """Let a CSVLogger start its file from the beginning."""
    logger._experiment = None


def set_purge_step(logger: Any, step: int) -> None:
    """Let a TensorBoardLogger that has not begun to write forget what its files have from a step on."""
    logger._kwargs.setdefault("purge_step", step)


def last_batch_value(metric: Metric) -> Any:
    """What the last call of a metric returned; None after its ``update`` alone."""
    return getattr(metric, "_forward_cache", None)


def set_update_count(metric: Metric, count: int) -> None:
    """Set how often a metric has been updated since its last reset."""
    metric._update_count = count


def sync_flags(metric: Metric) -> tuple[bool, bool]:
    """Whether a metric exchanges its state with other ranks: in ``forward``, and in ``compute``."""
    return metric._to_sync, metric.sync_on_compute


def set_sync_flags(metric: Metric, flags: tuple[bool, bool]) -> None:
    """Set both; :func:`sync_flags` gives what to restore."""
    metric._to_sync, metric.sync_on_compute = flags


def options_of(parser: Any) -> list[str]:
    """All options of a parser, such as ``--config``."""
    return [option for action in parser._actions for option in action.option_strings]


def action_of(parser: Any, name: str) -> Any:
    """What a parser does with the option of a name, such as ``model``."""
    return next(action for action in parser._actions if action.dest == name)


def set_type(action: Any, kind: Any) -> None:
    """Let an option take values of another type."""
    action._typehint = kind


def has_indices(dataset: Any) -> bool:
    """Whether a Hugging Face dataset is a selection of rows, so that its columns have others as well."""
    return dataset._indices is not None
