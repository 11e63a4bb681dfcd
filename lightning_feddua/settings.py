"""Every argument of the loop: its default, its check, and whether it decides the result of a run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from lightning.fabric.loggers import Logger

from lightning_feddua.aggregation.backend import Backend
from lightning_feddua.aggregation.transforms import ClipUpdateNorm, UpdateTransform
from lightning_feddua.callbacks import FederatedCallback
from lightning_feddua.checks import (
    check_choice,
    check_flag,
    check_instance,
    check_number,
    check_positive,
    check_whole,
)
from lightning_feddua.clients import LocalTraining
from lightning_feddua.engines.base import AUTO, Engine, LocalWork, find_engine
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.sampling import ClientSampler
from lightning_feddua.servers import Server

Check = Callable[[str, Any], None]


def argument(default: Any, check: Check | None = None, *, decides: bool = True, fixed: bool = False) -> Any:
    """A field of :class:`RunSettings`. None is never checked: it means that an argument was left out.

    Args:
        default: its default.
        check: raises one clear error for a value that is not allowed.
        decides: whether it decides the result, so that a run can be resumed only with the same value.
        fixed: whether the loop uses it once, when it is made, so that a later change would do nothing.
    """
    return field(default=default, metadata={"check": check, "decides": decides, "fixed": fixed})


def _whole(least: int) -> Check:
    return partial(check_whole, least=least)


def _one_of(*allowed: str) -> Check:
    return partial(check_choice, allowed=allowed)


def _a(kind: type) -> Check:
    return partial(check_instance, kind=kind)


def _each(kind: type) -> Check:
    def check(name: str, value: Any) -> None:
        for one in value if isinstance(value, list | tuple) else [value]:
            check_instance(name.removesuffix("s"), one, kind)

    return check


def _cohort(name: str, value: Any) -> None:
    check_number(name, value)
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ConfigurationError(
                f"`{name}={value}` is not a fraction of the clients.",
                "Give a float in (0, 1], a whole number of clients, or None for all.",
            )
    elif value < 1:
        raise ConfigurationError(f"`{name}={value}` is less than 1.", "Choose at least one client.")


def _engine(name: str, value: Any) -> None:
    if value != AUTO:
        find_engine(value)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The arguments of :class:`~lightning_feddua.FederatedLoop`, checked.

    Args:
        server: the server rule; :class:`FedDuAdagrad` by default.
        client: the clients' algorithm; plain local training by default.
        max_rounds: the number of rounds.
        clients_per_round: how many clients take part in a round; a fraction of them if a float; all if None.
        sampler: who takes part in a round, in place of ``clients_per_round``.
        local_steps: the number of local steps of each client. Exactly one of this and ``local_epochs`` is given.
        local_epochs: the number of passes of each client over its data.
        client_weights: ``"uniform"``, or ``"samples"`` to weight clients by their number of samples, in the mean update
            and in FedDuA's norms alike.
        gradient_clip_val: the largest global norm of a local gradient; None for no clipping.
        local_lr_decay: multiplies the module's learning rates in each round after the first.
        engine: how a rank runs its clients: ``"sequential"``, one after another, bit for bit as Trainer would;
            ``"vectorized"``, many in one vmapped step; ``"auto"``, whichever a few trial steps show to be faster; or
            an engine of your own, by its registered name or its import path.
        compile: whether the vectorized engine compiles the local steps of a stack of clients into one function, and
            a server of many parameters its step. That takes a minute or so at the first start, less at others, and is
            checked against the eager steps.
        channels_last: whether convolutions and images get this memory format, with which many are faster.
        lanes: into how many sums, added in a fixed order, the clients' updates go, so that with the sequential engine
            any number of ranks up to it gives the same bits. More lanes than twice the ranks take more memory and
            traffic, where there are more than two ranks. None adds in whatever order is fastest, in less memory.
        client_states: where the vectors are kept that an algorithm has for each client: ``"memory"`` or ``"disk"``.
        on_client_error: what happens when a client raises an exception, or its update is not finite: ``"raise"`` ends
            the run, on all ranks, with a :class:`ClientError`; ``"skip"`` warns, and leaves it out of the round. After
            three rounds in a row in which all clients failed the run ends in any case.
        max_update_norm: the largest norm of a client's update, to which longer ones are clipped, in the mean and in
            FedDuA's norms alike; None for no clipping.
        transforms: change the clients' updates before they are summed, or the round's update after that.
        validate_every: validate after every so many rounds and after the last; 0 for never.
        checkpoint_every: save the run after every so many rounds and after the last; None for never. A
            :class:`~lightning_feddua.callbacks.Checkpoint` among the callbacks can also keep the best rounds.
        out_dir: where runs are kept; each gets a folder ``version_N`` of its own.
        seed: of cohorts, minibatches and everything random in local steps.
        backend: where clients train; on the ranks of this run by default.
        accelerator: as in Fabric.
        strategy: as in Fabric; ``"ddp"`` and its variants.
        devices: as in Fabric; under torchrun, the processes it started.
        num_nodes: as in Fabric.
        precision: as in Fabric.
        timeout: seconds that ranks wait for each other in an exchange, the longest difference in their local training
            included. Then an error names those that are missing.
        callbacks: a callback or a list of them.
        loggers: Fabric or Lightning loggers; ``metrics.csv`` is written in any case.
        tensorboard: whether to log metrics, η_g, the norms of clients' updates and the recipe for TensorBoard;
            ``tensorboard --logdir runs`` shows them during the run.
        enable_progress_bar: whether to print a header and the progress.
    """

    server: Server | None = argument(None, _a(Server), fixed=True)
    client: LocalTraining | None = argument(None, _a(LocalTraining), fixed=True)
    max_rounds: int = argument(500, _whole(0), decides=False)
    clients_per_round: int | float | None = argument(None, _cohort)
    sampler: ClientSampler | None = argument(None, _a(ClientSampler))
    local_steps: int | None = argument(None, _whole(1))
    local_epochs: int | None = argument(None, _whole(1))
    client_weights: Literal["uniform", "samples"] = argument("uniform", _one_of("uniform", "samples"))
    gradient_clip_val: float | None = argument(None, check_positive)
    local_lr_decay: float = argument(1.0, check_positive)
    # A checkpoint remembers the engine that "auto" has chosen.
    engine: str | type[Engine] = argument("auto", _engine, decides=False)
    compile: bool = argument(False, check_flag)
    channels_last: bool = argument(False, check_flag)
    lanes: int | None = argument(8, _whole(1))
    client_states: Literal["memory", "disk"] = argument("memory", _one_of("memory", "disk"), decides=False)
    on_client_error: Literal["raise", "skip"] = argument("raise", _one_of("raise", "skip"), decides=False)
    max_update_norm: float | None = argument(None, check_positive)
    transforms: list[UpdateTransform] | None = argument(None, _each(UpdateTransform))
    validate_every: int = argument(1, _whole(0), decides=False)
    checkpoint_every: int | None = argument(None, _whole(1), decides=False, fixed=True)
    out_dir: str | Path = argument("runs", decides=False)
    seed: int = argument(0, _whole(0))
    backend: Backend | None = argument(None, _a(Backend), decides=False, fixed=True)
    accelerator: str = argument("auto", decides=False, fixed=True)
    strategy: str = argument("auto", decides=False, fixed=True)
    devices: int | list[int] | str = argument("auto", decides=False, fixed=True)
    num_nodes: int = argument(1, _whole(1), decides=False, fixed=True)
    precision: str = argument("32-true", fixed=True)
    timeout: float = argument(1800.0, check_positive, decides=False, fixed=True)
    callbacks: FederatedCallback | Sequence[FederatedCallback] | None = argument(
        None, _each(FederatedCallback), decides=False, fixed=True
    )
    loggers: Logger | list[Logger] | None = argument(None, decides=False, fixed=True)
    tensorboard: bool = argument(False, check_flag, decides=False, fixed=True)
    enable_progress_bar: bool = argument(True, check_flag, decides=False, fixed=True)

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
            both = f"both `local_steps={self.local_steps}` and `local_epochs={self.local_epochs}`"
            raise ConfigurationError(
                f"The amount of local training is unclear: {'neither' if self.local_steps is None else both} of"
                " `local_steps` and `local_epochs` given.",
                "Give exactly one of the two.",
            )
        if self.sampler is not None and self.clients_per_round is not None:
            raise ConfigurationError(
                f"Both `sampler` and `clients_per_round={self.clients_per_round}` choose who takes part.",
                "Give one of the two.",
            )

    def local_work(self, batch_size: int) -> LocalWork:
        """How much a client does in a round."""
        return LocalWork(self.local_steps, self.local_epochs, batch_size, self.gradient_clip_val)

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

P = ParamSpec("P")
Owner = TypeVar("Owner")


def takes(settings: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor, for type checkers, editors and ``help``, the arguments of another class."""

    def decorate(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [own, *signature(settings).parameters.values()]
        function.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return function

    return decorate


def documents(settings: type) -> Callable[[type[Owner]], type[Owner]]:
    """Put the arguments of another class into a class's docstring, before its example."""

    def decorate(owner: type[Owner]) -> type[Owner]:
        text, example, rest = (owner.__doc__ or "").partition("    Example:")
        arguments = (settings.__doc__ or "").partition("\n\n")[2].rstrip()
        owner.__doc__ = f"{text}{arguments}\n\n{example}{rest}"
        return owner

    return decorate
