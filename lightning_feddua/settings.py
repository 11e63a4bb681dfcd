"""Every argument of the loop: its default, its check, and whether it decides the result of a run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning import Callback
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.loggers import Logger
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import Strategy

from lightning_feddua.aggregation.backend import Backend
from lightning_feddua.aggregation.transforms import ClipUpdateNorm, UpdateTransform
from lightning_feddua.argument_checks import (
    Check,
    check_callbacks,
    check_engine,
    check_loggers,
    each_instance_of,
    flag_or,
    instance_of,
    of_fabric,
    one_of,
    whole,
)
from lightning_feddua.callbacks import FederatedCallback
from lightning_feddua.checks import (
    check_batches,
    check_cohort_size,
    check_flag,
    check_flag_or_count,
    check_positive,
)
from lightning_feddua.clients import LocalTraining
from lightning_feddua.engines.base import Clipping, Engine, LocalWork
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.sampling import ClientSampler
from lightning_feddua.servers import Server


def argument(default: Any, check: Check | None = None, *, decides: bool = True, fixed: bool = False) -> Any:
    """A field of :class:`RunSettings`. None is never checked: it means that an argument was left out.

    Args:
        default: its default.
        check: raises one clear error for a value that is not allowed.
        decides: whether it decides the result, so that a run can be resumed only with the same value.
        fixed: whether the loop uses it once, when it is made, so that a later change would do nothing.
    """
    return field(default=default, metadata={"check": check, "decides": decides, "fixed": fixed})


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The arguments of :class:`~lightning_feddua.FederatedLoop`, checked.

    Args:
        server: the server rule; :class:`FedDuAdagrad` by default.
        client: the clients' algorithm; plain local training by default.
        max_rounds: the number of rounds.
        clients_per_round: how many clients take part in a round; a fraction of them if a float; all if None.
        sampler: who takes part in a round, in place of ``clients_per_round``.
        local_steps: the number of optimizer steps of each client. Exactly one of this and ``local_epochs`` is given.
        local_epochs: the number of passes of each client over its data.
        accumulate_grad_batches: the number of minibatches whose gradients are added up for one optimizer step. With
            ``local_steps``, a client reads so many for each step; with ``local_epochs``, the last step of a pass may
            have fewer, as in Trainer.
        limit_train_batches: the number of minibatches in a pass of a client, or the fraction of them if a float, as in
            Trainer, but at least one; None for all. Needs ``local_epochs``.
        client_weights: ``"uniform"``, or ``"samples"`` to weight clients by their number of samples, in the mean update
            and in FedDuA's norms alike.
        gradient_clip_val: the largest global norm of a local gradient; None for no clipping.
        gradient_clip_algorithm: ``"norm"``, which is the default, or ``"value"``, with which ``gradient_clip_val`` is
            the largest absolute value of each element.
        local_lr_decay: multiplies the module's learning rates in each round after the first. It acts when an optimizer
            steps, so that schedulers and hooks may write rates in any way.
        engine: how a rank runs its clients: ``"sequential"``, one after another, bit for bit as Trainer would;
            ``"vectorized"``, many in one vmapped step; ``"auto"``, whichever should be faster by what a few trial
            steps show to count; or an engine of your own, by its registered name or its import path.
        compile: whether the vectorized engine compiles the local steps of a stack of clients into one function;
            ``"auto"``, where all clients' minibatches have the same shapes and the run is long enough to pay for it.
            That takes from seconds to minutes at the first start, less at others, and is checked against the eager
            steps. With True, a server of many parameters compiles its step, too.
        reproducible: whether the result is to depend on settings and data alone, and not on the number of ranks or
            cores: ``engine="auto"`` is then ``"sequential"``, ``threads`` is 1 unless given, on a GPU only
            deterministic algorithms run, and data that differs between two looks with the same seed is refused. That is
            slower where one process has several cores to itself.
        threads: how many threads local steps use on a CPU; None for as many as torch has. Another number rounds
            differently.
        channels_last: whether convolutions and images get this memory format, with which many are faster.
        lanes: into how many sums, added in a fixed order, the clients' updates go, so that with the sequential engine
            any number of ranks up to it gives the same bits. More lanes than twice the ranks take more memory and
            traffic, where there are more than two ranks. None adds in whatever order is fastest, in less memory.
        client_states: where the vectors are kept that an algorithm has for each client: ``"memory"`` or ``"disk"``.
        on_client_error: what happens when a client raises an exception, or its update, its buffers or what else it
            sends is not finite: ``"raise"`` ends the run, on all ranks, with a :class:`ClientError`; ``"skip"`` warns,
            and leaves it out of the round. After three rounds in a row in which all clients failed the run ends in any
            case, and so it does where a sum of finite updates, or the server's step, is not finite.
        client_timeout: seconds after which a client that still trains or reads its data is interrupted, and tried once
            more, with new worker processes; then it counts as one that fails. Who is slow may differ from run to run.
        max_update_norm: the largest norm of a client's update, to which longer ones are clipped, in the mean and in
            FedDuA's norms alike; None for no clipping.
        transforms: change the clients' updates before they are summed, or the round's update after that.
        validate_every: validate after every so many rounds and after the last; 0 for never.
        limit_val_batches: the number of batches in a validation, or the fraction of them if a float; 0 for no
            validation, None for all.
        num_sanity_val_steps: the number of batches that are validated before the first round, so that an error shows
            before any work; nothing of it remains. 0 for none, -1 for all.
        fast_dev_run: try everything once: one round, one local step or minibatch per pass, one batch of validation;
            or so many of each. Nothing is saved or logged, and no folder is left behind.
        enable_checkpointing: whether the run saves ``last.ckpt`` in its folder when it ends or is interrupted.
        checkpoint_every: save it after every so many rounds as well. A
            :class:`~lightning_feddua.callbacks.Checkpoint` among the callbacks can also keep the best rounds.
        out_dir: where runs are kept; each gets a folder ``version_N`` of its own.
        seed: of cohorts, minibatches and everything random in local steps.
        backend: where clients train; on the ranks of this run by default.
        accelerator: as in Fabric, by name or as an object.
        strategy: as in Fabric; ``"ddp"`` and its variants, or such a strategy as an object.
        devices: as in Fabric; under torchrun, the processes it started.
        num_nodes: as in Fabric.
        precision: as in Fabric, by name or as a plugin.
        timeout: seconds that ranks wait for each other in an exchange, the longest difference in their local training
            included. Then an error names those that are missing. A strategy given as an object keeps its own, unless
            this is given too.
        callbacks: a callback or a list of them, of this package or of Lightning.
        loggers: Fabric or Lightning loggers; ``metrics.csv`` is written in any case.
        tensorboard: whether to log metrics, η_g, the norms of clients' updates and the recipe for TensorBoard;
            ``tensorboard --logdir runs`` shows them during the run.
        enable_progress_bar: whether to print a header and the progress.
        log_clients: whether to write ``clients.csv``: a line for each client of each round, with its number of samples
            and what it has logged in training.
    """

    server: Server | None = argument(None, instance_of(Server), fixed=True)
    client: LocalTraining | None = argument(None, instance_of(LocalTraining), fixed=True)
    max_rounds: int = argument(500, whole(0), decides=False)
    clients_per_round: int | float | None = argument(None, check_cohort_size)
    sampler: ClientSampler | None = argument(None, instance_of(ClientSampler))
    local_steps: int | None = argument(None, whole(1))
    local_epochs: int | None = argument(None, whole(1))
    accumulate_grad_batches: int = argument(1, whole(1))
    limit_train_batches: int | float | None = argument(None, partial(check_batches, least=1))
    client_weights: Literal["uniform", "samples"] = argument("uniform", one_of("uniform", "samples"))
    gradient_clip_val: float | None = argument(None, check_positive)
    gradient_clip_algorithm: Literal["norm", "value"] | None = argument(None, one_of("norm", "value"))
    local_lr_decay: float = argument(1.0, check_positive)
    # A checkpoint remembers the engine that "auto" has chosen.
    engine: str | type[Engine] = argument("auto", check_engine, decides=False)
    compile: bool | Literal["auto"] = argument("auto", flag_or("auto"))
    reproducible: bool = argument(False, check_flag)
    threads: int | None = argument(None, whole(1))
    channels_last: bool = argument(False, check_flag)
    lanes: int | None = argument(8, whole(1))
    client_states: Literal["memory", "disk"] = argument("memory", one_of("memory", "disk"), decides=False)
    on_client_error: Literal["raise", "skip"] = argument("raise", one_of("raise", "skip"), decides=False)
    client_timeout: float | None = argument(None, partial(check_positive, finite=True), decides=False)
    max_update_norm: float | None = argument(None, check_positive)
    transforms: list[UpdateTransform] | None = argument(None, each_instance_of(UpdateTransform))
    validate_every: int = argument(1, whole(0), decides=False)
    limit_val_batches: int | float | None = argument(None, partial(check_batches, least=0), decides=False)
    num_sanity_val_steps: int = argument(2, whole(-1), decides=False)
    fast_dev_run: bool | int = argument(False, check_flag_or_count, decides=False, fixed=True)
    enable_checkpointing: bool = argument(True, check_flag, decides=False, fixed=True)
    checkpoint_every: int | None = argument(None, whole(1), decides=False, fixed=True)
    out_dir: str | Path = argument("runs", decides=False)
    seed: int = argument(0, whole(0))
    backend: Backend | None = argument(None, instance_of(Backend), decides=False, fixed=True)
    accelerator: str | Accelerator = argument("auto", of_fabric(Accelerator), decides=False, fixed=True)
    strategy: str | Strategy = argument("auto", of_fabric(Strategy), decides=False, fixed=True)
    devices: int | list[int] | str = argument("auto", decides=False, fixed=True)
    num_nodes: int = argument(1, whole(1), decides=False, fixed=True)
    precision: str | Precision = argument("32-true", fixed=True)
    timeout: float = argument(1800.0, check_positive, decides=False, fixed=True)
    callbacks: FederatedCallback | Callback | Sequence[FederatedCallback | Callback] | None = argument(
        None, check_callbacks, decides=False, fixed=True
    )
    loggers: Logger | list[Logger] | None = argument(None, check_loggers, decides=False, fixed=True)
    tensorboard: bool = argument(False, check_flag, decides=False, fixed=True)
    enable_progress_bar: bool = argument(True, check_flag, decides=False, fixed=True)
    log_clients: bool = argument(False, check_flag, decides=False, fixed=True)

    def __post_init__(self) -> None:
        if isinstance(self.transforms, tuple | list | UpdateTransform):
            several = [self.transforms] if isinstance(self.transforms, UpdateTransform) else list(self.transforms)
            object.__setattr__(self, "transforms", several or None)
        for one in fields(self):
            check, value = one.metadata["check"], getattr(self, one.name)
            if value is None and one.default is not None and not _may_be_none(one.type):
                raise ConfigurationError(f"`{one.name}=None` is not allowed.", f"The default is `{one.default}`.")
            if check is not None and value is not None:
                check(one.name, value)
        if (self.local_steps is None) == (self.local_epochs is None):
            both = f"Both `local_steps={self.local_steps}` and `local_epochs={self.local_epochs}` are given."
            raise ConfigurationError(
                "Neither `local_steps` nor `local_epochs` is given." if self.local_steps is None else both,
                "Give exactly one of the two.",
            )
        if self.reproducible and self.threads is None:
            object.__setattr__(self, "threads", 1)
        if self.fast_dev_run:
            self._shorten(int(self.fast_dev_run))
        elif self.limit_train_batches is not None and self.local_epochs is None:
            raise ConfigurationError(
                f"`limit_train_batches={self.limit_train_batches}` shortens a client's passes over its data, and"
                f" `local_steps={self.local_steps}` counts steps.",
                "Give `local_epochs` instead of `local_steps`, or leave `limit_train_batches` out.",
            )
        if self.sampler is not None and self.clients_per_round is not None:
            raise ConfigurationError(
                f"Both `sampler` and `clients_per_round={self.clients_per_round}` choose who takes part.",
                "Give one of the two.",
            )

    def _shorten(self, count: int) -> None:
        """The settings of a run that tries everything a few times, and keeps nothing."""
        shorter: dict[str, Any] = {"max_rounds": count, "limit_val_batches": count, "num_sanity_val_steps": 0}
        shorter |= {"validate_every": 1, "checkpoint_every": None, "loggers": None, "tensorboard": False}
        if self.local_epochs is None:
            shorter |= {"local_steps": count, "limit_train_batches": None}
        else:
            shorter |= {"local_epochs": 1, "limit_train_batches": count}
        for name, value in shorter.items():
            object.__setattr__(self, name, value)

    def local_work(self, batch_size: int, drop_last: bool = False) -> LocalWork:
        """How much a client does in a round."""
        value, algorithm = self.gradient_clip_val, self.gradient_clip_algorithm or "norm"
        clip = None if value is None else Clipping(value, algorithm)
        limit, accumulate = self.limit_train_batches, self.accumulate_grad_batches
        rest = limit, drop_last, self.client_timeout
        return LocalWork(self.local_steps, self.local_epochs, batch_size, clip, accumulate, *rest)

    def of_trainer(self) -> dict[str, Any]:
        """What Trainer has under the same names, as Trainer has it; and the number of rounds."""
        same = ("max_rounds", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "fast_dev_run")
        limits = {name: getattr(self, name) for name in ("limit_train_batches", "limit_val_batches")}
        sanity = math.inf if self.num_sanity_val_steps == -1 else self.num_sanity_val_steps
        values = {name: getattr(self, name) for name in same} | {"num_sanity_val_steps": sanity}
        return values | {name: 1.0 if value is None else value for name, value in limits.items()}

    def all_transforms(self) -> list[UpdateTransform]:
        """The transforms, with that of ``max_update_norm`` before them."""
        clip = [] if self.max_update_norm is None else [ClipUpdateNorm(self.max_update_norm)]
        return [*clip, *(self.transforms or [])]

    def deciding(self) -> Iterator[tuple[str, Any]]:
        """Names and values of the settings that decide the result of a run."""
        return ((one.name, getattr(self, one.name)) for one in fields(self) if one.metadata["decides"])


def _may_be_none(annotation: Any) -> bool:
    return (
        isinstance(None, annotation)
        if isinstance(annotation, type)
        else type(None) in getattr(annotation, "__args__", ())
    )


FIXED = frozenset(one.name for one in fields(RunSettings) if one.metadata["fixed"])
