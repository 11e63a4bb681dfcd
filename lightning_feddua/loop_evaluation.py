"""What a loop does with a model besides training it: validation, test and prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning import LightningDataModule, LightningModule
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.checkpoints.files import find_checkpoint
from lightning_feddua.checkpoints.weights import check_model, load_weights
from lightning_feddua.data.module import FederatedDataModule, as_datamodule
from lightning_feddua.data.wrapped import PredictedDataModule
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.client_evaluation import evaluate_clients
from lightning_feddua.host.federation import Federation
from lightning_feddua.host.prediction import predict
from lightning_feddua.lightning_names import is_datamodule
from lightning_feddua.loop_attributes import LoopAttributes
from lightning_feddua.run import Run

_Kind = Literal["validation", "clients", "test", "predict"]
_SETUP: dict[str, Literal["validate", "test", "predict"]] = {"test": "test", "predict": "predict"}

_DATASETS = {"validation": "val_dataset", "test": "test_dataset"}


class LoopEvaluation(LoopAttributes):
    """``validate``, ``test`` and ``predict``, with the weights that the model has or those of a checkpoint."""

    fabric: Fabric
    callbacks: list[FederatedCallback]
    _launch: Callable[..., Any]
    _set_up: Callable[..., None]
    _take_callbacks: Callable[..., Any]

    def validate(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        per_client: bool = False,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Metrics of the model's ``validation_step`` on the data module's validation data.

        Args:
            model: the model.
            datamodule: the data.
            per_client: validate on each client's own data instead, and return the mean, the standard deviation and the
                mean of the worst tenth over clients, as ``name/mean``, ``name/std`` and ``name/worst_decile``. The
                metrics of each client are in ``loop.client_metrics`` afterwards.
            ckpt_path: a checkpoint whose weights the model gets first; or ``"last"``, for that of the newest run in
                ``out_dir``; or ``"best"``, for the best one that a ``Checkpoint`` with a ``monitor`` has kept, in
                this loop's fit or else in that run. Where the run has validated the average of its last two iterates,
                the model gets that average, so that the metrics are the run's.
        """
        kind: _Kind = "clients" if per_client else "validation"
        return self._launch(self._evaluate, model, as_datamodule(datamodule), kind, ckpt_path)

    def test(
        self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> dict[str, float]:
        """Metrics of the model's ``test_step`` on the data module's test data.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: as in :meth:`validate`.
        """
        return self._launch(self._evaluate, model, as_datamodule(datamodule), "test", ckpt_path)

    def predict(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | Dataset[Any] | DataLoader[Any] | Sequence[Any],
        ckpt_path: str | Path | None = None,
    ) -> list[Any]:
        """The outputs of the model's ``predict_step``, batch by batch, as ``Trainer.predict`` gives them.

        They are on the CPU, in the order of the data and complete on every rank, whatever the number of ranks.

        Args:
            model: the model.
            datamodule: the data: the ``predict_dataset`` of a data module, or else its test data; or what
                ``predict_dataloader`` of a data module for Trainer returns; or just a dataset, a DataLoader, or a list
                of these.
            ckpt_path: as in :meth:`validate`.

        Returns:
            A list with the output of each batch; for several datasets, a list of these.
        """
        if isinstance(datamodule, Dataset | DataLoader) and not isinstance(datamodule, Mapping):
            # Nobody trains here, but a federation has clients.
            datamodule = FederatedDataModule({"predict": datamodule}, predict_dataset=datamodule)
        elif isinstance(datamodule, list | tuple):
            datamodule = FederatedDataModule({"predict": [0]}, predict_dataset=list(datamodule))
        elif is_datamodule(datamodule) and not isinstance(datamodule, FederatedDataModule):
            datamodule = PredictedDataModule(datamodule)
        return self._launch(self._evaluate, model, as_datamodule(datamodule), "predict", ckpt_path)

    def check(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule | Mapping[str, Dataset[Any]],
        ckpt_path: str | Path,
    ) -> None:
        """Find out, without training, whether a fit could be resumed from a checkpoint.

        Args:
            model: the model.
            datamodule: the data.
            ckpt_path: as in :meth:`fit`.

        Raises:
            ConfigurationError: the checkpoint is damaged, is not what the run has left, or belongs to another run.
        """
        self._launch(self._check, model, as_datamodule(datamodule), ckpt_path)

    def _check(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str | Path) -> None:
        found = find_checkpoint(self.fabric, self.out_dir, ckpt_path)
        self.run = Run(self.out_dir)
        with Federation(self.fabric, model, datamodule, self.settings, "fit", self._take_callbacks) as federation:
            self._federation = federation
            checkpoint = {} if found is None else found.checkpoint
            self._set_up(federation, found)
            if found is not None:
                check_model(federation, self.run.average, checkpoint, found.path)

    def _evaluate(
        self, model: LightningModule, datamodule: FederatedDataModule, kind: _Kind, ckpt_path: str | Path | None
    ) -> Any:
        stage = _SETUP.get(kind, "validate")
        with Federation(self.fabric, model, datamodule, self.settings, stage, self._take_callbacks) as federation:
            if ckpt_path is not None:
                load_weights(federation, self.out_dir, ckpt_path, self.callbacks)
            if kind == "clients":
                statistics, self.client_metrics = evaluate_clients(federation)
                return statistics
            if kind != "predict":
                if not datamodule.evaluation_data(kind):
                    rank_zero_warn(f"There is no {kind} data. Give the data module a `{_DATASETS[kind]}`.")
                return federation.evaluate(kind)
            sets = datamodule.evaluation_data("predict")
            if not sets:
                raise ConfigurationError(
                    "There is no data to predict.", "Give the data module a `predict_dataset`, or a test dataset."
                )
            return predict(self.fabric, federation.evaluator, sets)
