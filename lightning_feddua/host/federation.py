"""A module and its clients, set up on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning import LightningModule
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_feddua.aggregation.collectives import on_local_rank_zero
from lightning_feddua.aggregation.dealing import deal
from lightning_feddua.aggregation.metric_rows import Table, exchange
from lightning_feddua.data.client_data import ClientData
from lightning_feddua.data.module import FederatedDataModule, dataset_size
from lightning_feddua.data.partition import Partition
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.batch_transfer import BatchTransfer
from lightning_feddua.host.buffers import ModuleBuffers
from lightning_feddua.host.evaluation import Evaluator, Stage, client_statistics
from lightning_feddua.host.optimizers import LocalOptimizers
from lightning_feddua.host.parameters import FlatParameters, trainable_parameters
from lightning_feddua.host.trainer_view import TrainerView
from lightning_feddua.randomness import preserved_random_state
from lightning_feddua.vectors import scalar_dtype, squared_norm

if TYPE_CHECKING:
    from lightning_feddua.settings import RunSettings


class Federation:
    """Holds a module ready for federated work while in its ``with`` block, and gives it back in order afterwards.

    Inside, the module is on its device and in its precision, the same on every rank, its trainable parameters are one
    vector, and it finds a view of the run at ``self.trainer``. Everything that can be wrong with the module or the data
    is found on entry.

    Args:
        fabric: devices, ranks and precision, already launched.
        module: the user's module.
        datamodule: its clients.
        stage: what it is for, told to the `setup` and `teardown` of module and data.
        seed: of everything random in validation.
        channels_last: whether convolutions and images get this memory format.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: LightningModule,
        datamodule: FederatedDataModule,
        stage: Literal["fit", "validate", "test"] = "fit",
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        self.fabric = fabric
        self._setup_stage = stage
        self._seed = seed
        self._channels_last = channels_last
        self.module = module
        self.datamodule = datamodule
        self._stack = ExitStack()

    def __enter__(self) -> Federation:
        with self._stack:
            self._enter()
            self._stack = self._stack.pop_all()
        return self

    def _enter(self) -> None:
        self._stack.enter_context(preserved_random_state(self.fabric.device))
        self.view = TrainerView(self.fabric, self.module)
        self.view.datamodule = self.datamodule.hook_owner
        self._stack.enter_context(self.view.attached(self.module))
        self._stack.enter_context(self.view.attached(self.datamodule))
        self._stack.enter_context(self.view.attached(self.datamodule.hook_owner))
        self._set_up_data()
        self._set_up_module()
        self._frozen = _fingerprints(self.module)
        self.parameters = FlatParameters(self.module)
        self._stack.callback(self.parameters.release)
        self.buffers = ModuleBuffers(self.module)
        self.transfer = BatchTransfer(self.fabric, self.module, self.datamodule.hook_owner, self._channels_last)
        self.evaluator = Evaluator(self.fabric, self.module, self.view, self.transfer, self._seed)

    def configure_optimizers(self, settings: RunSettings) -> None:
        """Ask the module for its optimizers, which all clients then use in turn.

        Schedules that ask how long training is get the answer for the largest client.
        """
        self.view.max_rounds = settings.max_rounds
        self.view.gradient_clip_val = settings.gradient_clip_val
        self.view.start_client(settings.local_work(self.datamodule.batch_size), lambda: int(self.sizes.max()))
        self.view.local_optimizers = self.optimizers = LocalOptimizers(self.module, self.view.strategy)

    def check_frozen(self) -> None:
        """One clear error if a client changed what is neither trained nor a buffer, and so would leak to the next."""
        now = _fingerprints(self.module)
        for name, fingerprint in self._frozen.items():
            if now.get(name) != fingerprint:
                raise ConfigurationError(
                    f"The frozen parameter `{name}` changed, or was unfrozen, in a client's local steps.",
                    "Make it a buffer, which is averaged, or let it require gradients from the start.",
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def at_exit(self, function: Callable[[], None]) -> None:
        """Call a function when the run ends, or fails."""
        self._stack.callback(function)

    def _set_up_data(self) -> None:
        on_local_rank_zero(self.fabric, self.datamodule.prepare_data)
        self.datamodule.setup(self._setup_stage)
        self._stack.callback(self.datamodule.teardown, self._setup_stage)
        self.client_ids = self.datamodule.client_ids
        if len(self.client_ids) == 0:
            raise ConfigurationError("The data module has no clients.", "Give it at least one client's dataset.")
        if self.datamodule.sizes_are_known:
            empty = (self.sizes == 0).nonzero()[0]
            if len(empty):
                raise _empty_client(self.client_ids[empty[0]], others=len(empty) - 1)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of samples of each client. A mapping that does not know them has to make all its datasets.

        A client whose dataset cannot be made counts as one without samples: it fails when it takes part.
        """
        lazy = not self.datamodule.sizes_are_known
        return self.datamodule.client_sizes(on_error=(lambda name, error: None) if lazy else None)

    def _set_up_module(self) -> None:
        if is_overridden("configure_callbacks", self.module):
            raise ConfigurationError(
                f"`{type(self.module).__name__}` has `configure_callbacks`, and Trainer's callbacks are not run here.",
                "Remove it, and pass `FederatedCallback`s to the loop.",
            )
        if is_overridden("setup", self.module):
            self.module.setup(self._setup_stage)
            self._stack.callback(self.module.teardown, self._setup_stage)
        if is_overridden("configure_model", self.module):
            self.module.configure_model()
        trainable_parameters(self.module)
        self.fabric.strategy.precision.convert_module(self.module)
        self.fabric.to_device(self.module)
        if self._channels_last:
            self.module.to(memory_format=torch.channels_last)
        if self.fabric.world_size > 1:
            for tensor in chain(self.module.parameters(), self.module.buffers()):
                torch.distributed.broadcast(tensor.data, src=0)

    def global_weights(self) -> Tensor:
        """A copy of the module's trainable parameters for the server, in float32 at least."""
        vector = self.parameters.vector
        return vector.to(torch.promote_types(vector.dtype, torch.float32), copy=True)

    @contextmanager
    def training(self, weights: Tensor) -> Iterator[None]:
        """Around local steps, which use the module as they like: on leaving, it holds global weights and buffers."""
        try:
            yield
        finally:
            self.parameters.drop_gradients()
            self.restore(weights)

    def restore(self, weights: Tensor) -> None:
        """Put global weights and buffers into the module."""
        self.parameters.load(weights)
        self.buffers.restore()

    def load(self, state_dict: dict[str, Any], buffers: dict[str, Tensor]) -> None:
        """Take over the module's saved state: parameters, frozen ones among them, and buffers."""
        try:
            self.module.load_state_dict(state_dict, strict=self.module.strict_loading)
        except RuntimeError as error:
            problem = " ".join(str(error).split()).rstrip(".")
            raise ConfigurationError(f"The checkpoint does not fit the model: {problem}.", "Start afresh.") from error
        self.buffers.load(buffers)
        self._frozen = _fingerprints(self.module)

    def client_data(self, client: int, stage: Literal["fit", "validation"] = "fit") -> ClientData:
        """The samples of the client at a place; for validation, those held out for it where there are any."""
        clients = self.datamodule.clients
        if stage == "validation" and self.datamodule.val_clients is not None:
            dataset = self.datamodule.val_clients[str(self.client_ids[client])]
        else:
            dataset = clients.at(client) if isinstance(clients, Partition) else clients[self.client_ids[client]]
        if not self.datamodule.sizes_are_known and dataset_size(self.client_ids[client], dataset) == 0:
            raise _empty_client(self.client_ids[client])
        return ClientData(dataset, self.datamodule.collate_fn)

    def evaluate(self, stage: Stage) -> dict[str, float]:
        """Metrics of the weights in the module; empty where there is no data or no step for the stage."""
        data = self.datamodule.evaluation_data(stage)
        if data is None or not is_overridden(f"{stage}_step", self.module):
            return {}
        return self.evaluator.run(*data, stage)

    def check_validation(self, wanted: bool) -> None:
        """A warning where there is validation data, but no step to validate with."""
        has_data = wanted and self.datamodule.evaluation_data("validation") is not None
        if has_data and not is_overridden("validation_step", self.module):
            rank_zero_warn(
                f"There is validation data, but `{type(self.module).__name__}` does not define `validation_step`."
                " Nothing will be validated."
            )

    def evaluate_clients(self) -> dict[str, float]:
        """How the weights in the module do on each client's own data: mean, standard deviation and worst decile."""
        clients = len(self.client_ids)
        if not is_overridden("validation_step", self.module):
            raise ConfigurationError(
                f"`{type(self.module).__name__}` does not define `validation_step`.", "Log a client's metrics in it."
            )
        held_out = self.datamodule.val_clients
        missing = [] if held_out is None else [name for name in map(str, self.client_ids) if name not in held_out]
        if missing:
            raise ConfigurationError(
                f"`val_clients` has no data for client `{missing[0]}`.", "Give it a dataset for each client."
            )
        hand = deal(self.sizes.tolist(), self.fabric.world_size)[self.fabric.global_rank]
        rows = {
            client: self.evaluator.run_client(self.client_data(client, "validation"), self.datamodule.eval_batch_size)
            for client in hand
        }
        return client_statistics(exchange(self.fabric, Table(self.fabric), rows, clients))


def as_datamodule(datamodule: Any) -> FederatedDataModule:
    """A data module, or a mapping of datasets made into one."""
    if isinstance(datamodule, Mapping):
        return FederatedDataModule(datamodule)
    if not isinstance(datamodule, FederatedDataModule):
        raise ConfigurationError(
            f"The data is a `{type(datamodule).__name__}`, which has no clients.",
            "Give a `FederatedDataModule`, or a mapping of datasets by client name.",
        )
    return datamodule


def _empty_client(name: str, others: int = 0) -> ConfigurationError:
    more = f" and {others} more" if others else ""
    return ConfigurationError(
        f"The dataset of client `{name}`{more} is empty.", "Leave such clients out of the data module."
    )


def _fingerprints(module: LightningModule) -> dict[str, tuple[float, float]]:
    """Two sums of each frozen parameter, which tell whether it has changed."""
    sums = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            values = parameter.detach().reshape(-1)
            sums[name] = (values.sum(dtype=scalar_dtype(values.device)).item(), squared_norm(values).item())
    return sums
