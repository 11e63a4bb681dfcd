"""A module and its clients, set up on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from torch import Tensor

from lightning_feddua.aggregation.collectives import broadcast_tensors, on_local_rank_zero
from lightning_feddua.data.client_data import ClientData
from lightning_feddua.data.evaluation_data import Stage, check_limit
from lightning_feddua.data.module import FederatedDataModule
from lightning_feddua.data.partition import Partition
from lightning_feddua.data.streams import dataset_size, work_sizes
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.batch_transfer import BatchTransfer
from lightning_feddua.host.buffers import ModuleBuffers
from lightning_feddua.host.evaluation import Evaluator
from lightning_feddua.host.evaluation_steps import EvaluationSteps
from lightning_feddua.host.hidden.hidden_state import HiddenState
from lightning_feddua.host.lightning_callbacks import LightningCallbacks, configured_callbacks
from lightning_feddua.host.optimizers import LocalOptimizers
from lightning_feddua.host.other_parameters import OtherParameters
from lightning_feddua.host.parameters import FlatParameters
from lightning_feddua.host.removed_hooks import check_removed_hooks
from lightning_feddua.host.schedules import LocalSchedules, check_manual_optimization
from lightning_feddua.host.tensor_checks import check_initialised, check_tensors, tensor_names
from lightning_feddua.host.trainer.view import TrainerView
from lightning_feddua.host.world_of_one import WorldOfOne
from lightning_feddua.launch.arithmetic import fixed_arithmetic
from lightning_feddua.launch.processes import forks
from lightning_feddua.lightning_names import is_overridden
from lightning_feddua.randomness import preserved_random_state

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
        settings: the loop's.
        stage: what it is for, told to the `setup` and `teardown` of module and data.
        callbacks: gets what the module's ``configure_callbacks`` returns, and tells which callbacks of Lightning's are
            to be called, and all there are.
    """

    unsteady_client: str | None = None  # whose samples are others each time they are read with the same seed

    def __init__(
        self,
        fabric: Fabric,
        module: LightningModule,
        datamodule: FederatedDataModule,
        settings: RunSettings,
        stage: Literal["fit", "validate", "test", "predict"] = "fit",
        callbacks: Callable[[list[Any]], tuple[list[Any], list[Any]]] = lambda configured: (configured, configured),
    ) -> None:
        self.fabric = fabric
        self._settings = settings
        self._setup_stage = stage
        self._choose_callbacks = callbacks
        limited = stage in ("fit", "validate") or settings.fast_dev_run
        self._limit_batches = settings.limit_val_batches if limited else None
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
        self._stack.enter_context(fixed_arithmetic(self._settings, self.fabric.device))
        check_removed_hooks(self.module, self._setup_stage)
        self.world_of_one = WorldOfOne(self.fabric)
        self._stack.callback(self.world_of_one.close)
        self.view = TrainerView(self.fabric, self.module, self._setup_stage)
        self.view.datamodule = self.datamodule.hook_owner
        self.view.evaluation_data = self.datamodule.evaluation_data
        for owner in (self.module, self.datamodule, self.datamodule.hook_owner):
            self._stack.enter_context(self.view.attached(owner))
        called, self.view.callbacks = self._choose_callbacks(configured_callbacks(self.module))
        self.callbacks = LightningCallbacks(self.view, self.module, called)
        self._stack.callback(self.callbacks.release)
        self._set_up_data()
        if self._setup_stage == "fit":
            self.view.set_folder(str(self._settings.out_dir))
            self._show()
        self._set_up_module()
        self.buffers = ModuleBuffers(self.module)
        self.hidden_state = HiddenState(self.module, self._managed)
        self.hidden_state.watch(*called)
        if self._setup_stage != "fit":
            self._flatten(None)
        self.transfer = BatchTransfer(
            self.fabric, self.module, self.datamodule.hook_owner, self._settings.channels_last
        )
        self.evaluator = Evaluator(
            self.fabric,
            self.module,
            self.view,
            self.transfer,
            self.world_of_one,
            self.callbacks,
            lambda: self.hidden_state.present(deep=True),
            self.buffers,
            self._settings.seed,
            self._limit_batches,
        )

    def _flatten(self, held: list[Tensor] | None) -> None:
        """Make one vector of what is trained: what requires gradients, and an optimizer holds."""
        check_tensors(self.module, held, self.hidden_state.snapshot())
        self.parameters = FlatParameters(self.module, held)
        self._stack.callback(self.parameters.release)
        self.other_parameters = OtherParameters(self.module, self.parameters.tensors)

    def _managed(self) -> Iterator[object]:
        """What is loaded or reset for each client anyway."""
        objects = self.optimizers.objects if hasattr(self, "optimizers") else list
        return chain(self.module.parameters(), self.buffers.tensors(), objects())

    def configure_optimizers(self) -> None:
        """Ask the module for its optimizers, which clients then use in turn."""
        self._show()
        check_manual_optimization(self.module, self._settings)
        self.schedules = LocalSchedules(self.fabric, self.module, self.view, self.work, lambda: self.work_sizes)
        held = [group["params"] for optimizer in self.use_optimizers().optimizers for group in optimizer.param_groups]
        self._flatten([parameter for parameters in held for parameter in parameters])

    def use_optimizers(self, size: int | None = None) -> LocalOptimizers:
        """Train with the optimizers of a client with this many samples; of the largest if None."""
        self.view.local_optimizers = self.optimizers = self.schedules.of(size)
        return self.optimizers

    def _show(self) -> None:
        """Let the module see the settings in its trainer; outside of clients, with the work of the largest client."""
        for name, value in self._settings.of_trainer().items():
            setattr(self.view, name, value)
        self.view.drop_last = self.datamodule.drop_last
        self.work = self._settings.local_work(self.datamodule.batch_size, self.datamodule.drop_last)
        self.view.start_client(self.work, lambda: int(self.work_sizes.max()))

    def check_client(self, last: bool = False) -> None:
        """One clear error if a client has changed something that can neither be averaged nor undone.

        Args:
            last: whether it is the last of the round, and everything is to be looked at.
        """
        self.other_parameters.check(last)
        self.hidden_state.check(last)

    def let_move(self, names: list[str]) -> None:
        """Average parameters that local steps move without an optimizer, such as a teacher's, like float buffers."""
        self.other_parameters.let_move(names)
        self.buffers.include(names)

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
        if self.datamodule.sizes_are_known and len(empty := (self.sizes == 0).nonzero()[0]):
            raise _empty_client(self.client_ids[empty[0]], others=len(empty) - 1)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of samples of each client. A mapping that does not know them has to make all its datasets.

        A client whose dataset cannot be made counts as one without samples: it fails when it takes part.
        """
        known = self.datamodule.sizes_are_known
        return self.datamodule.client_sizes(on_error=None if known else lambda name, error: None)

    @cached_property
    def work_sizes(self) -> np.ndarray:
        """The sizes of clients as their work is counted, which for DataLoaders and streams is by their own batches."""
        return work_sizes(self.datamodule.clients, lambda: self.sizes, self.datamodule.batch_size)

    def _set_up_module(self) -> None:
        names = tensor_names(self.module)
        self.callbacks.call("setup", stage=self._setup_stage)
        if is_overridden("setup", self.module):
            self.module.setup(self._setup_stage)
            self._stack.callback(self.module.teardown, self._setup_stage)
        self._stack.callback(self.callbacks.call, "teardown", stage=self._setup_stage)
        if is_overridden("configure_model", self.module):
            self.module.configure_model()
        check_initialised(self.module, names if forks(self.fabric) else None)
        self.fabric.strategy.precision.convert_module(self.module)
        self.fabric.to_device(self.module)
        if self._settings.channels_last:
            self.module.to(memory_format=torch.channels_last)
        broadcast_tensors(self.fabric, [t.data for t in chain(self.module.parameters(), self.module.buffers())])

    def global_weights(self) -> Tensor:
        """A copy of the module's trainable parameters for the server, in float32 at least."""
        return self.parameters.vector.to(torch.promote_types(self.parameters.vector.dtype, torch.float32), copy=True)

    @contextmanager
    def training(self, weights: Tensor) -> Iterator[None]:
        """Around local steps, which use the module as they like: on leaving, it holds global weights and buffers."""
        self.hidden_state.take()
        try:
            yield
        finally:
            self.drop_gradients()
            self.hidden_state.restore(deep=True)
            self.restore(weights)

    def drop_gradients(self) -> None:
        """Forget gradients, so that none reaches the next client."""
        self.parameters.drop_gradients()
        self.other_parameters.drop_gradients()

    def restore(self, weights: Tensor) -> None:
        """Put global weights and buffers into the module."""
        self.parameters.load(weights)
        self.buffers.restore()

    def load(self, state_dict: dict[str, Any], buffers: dict[str, Tensor]) -> None:
        """Take over the module's saved state: parameters, frozen ones among them, and buffers."""
        try:
            self.module.load_state_dict(state_dict, strict=self.module.strict_loading)
        except RuntimeError as error:
            problem, remedy = " ".join(str(error).split()).rstrip("."), "Make the model with its saved arguments."
            raise ConfigurationError(f"The checkpoint does not fit the model: {problem}.", remedy) from error
        self.buffers.load(buffers)
        self.other_parameters.note()

    def client_data(self, client: int, stage: Literal["fit", "validation"] = "fit") -> ClientData:
        """The samples of the client at a place; for validation, those held out for it where there are any."""
        clients = self.datamodule.clients
        val_clients = self.datamodule.val_clients if stage == "validation" else None
        if val_clients is not None:
            dataset = val_clients[str(self.client_ids[client])]
        else:
            dataset = clients.at(client) if isinstance(clients, Partition) else clients[self.client_ids[client]]
        if not self.datamodule.sizes_are_known and dataset_size(self.client_ids[client], dataset) == 0:
            raise _empty_client(self.client_ids[client])
        return self.datamodule.read(dataset, val_clients is not None)

    def evaluate(self, stage: Stage) -> dict[str, float]:
        """Metrics of the weights in the module; empty where there is no data or no step for the stage."""
        data = self.datamodule.evaluation_data(stage)
        if not data or not is_overridden(f"{stage}_step", self.module) or self._limit_batches == 0:
            return {}
        check_limit(data, self._limit_batches)
        return self.evaluator.run(data, stage)

    def check_validation(self, wanted: bool) -> None:
        """A warning where there is validation data, but no step to validate with; an error if the step cannot be."""
        data = self.datamodule.evaluation_data("validation") if wanted else []
        check_limit(data, self._limit_batches)
        if data and is_overridden("validation_step", self.module):
            EvaluationSteps(self.module, "validation", len(data))
        elif data:
            rank_zero_warn(
                f"There is validation data, but `{type(self.module).__name__}` does not define `validation_step`."
                " Nothing will be validated."
            )


def _empty_client(name: str, others: int = 0) -> ConfigurationError:
    problem = f"The dataset of client `{name}`{f' and {others} more' if others else ''} is empty."
    return ConfigurationError(problem, "Leave such clients out of the data module.")
