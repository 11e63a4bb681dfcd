"""How a module's training step is called, and what it may override around it."""

import inspect
from collections.abc import Mapping
from typing import Any

from lightning import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_feddua.errors import ConfigurationError
from lightning_feddua.lightning_names import is_overridden

# What a module may override around its local steps.
TRAINING_HOOKS = (
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
)


def takes_batch_idx(module: LightningModule) -> bool:
    """Whether `training_step` wants the batch's number; one clear error where it wants what there is not."""
    name = type(module).__name__
    if not is_overridden("training_step", module):
        raise ConfigurationError(f"`{name}` does not define `training_step`.", "Return the loss of a batch from it.")
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise ConfigurationError(
            f"`{name}.training_step` takes a `dataloader_iter`, and a federated client has none.",
            "Write it as `training_step(self, batch, batch_idx)`.",
        )
    return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)


def loss_of(output: Any, automatic: bool = True) -> Tensor | None:
    """The loss in what a `training_step` returned. In manual optimization, a dict need not have one."""
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and ("loss" in output or not automatic):
        return output.get("loss")
    raise TypeError(
        f"`training_step` returned `{type(output).__name__}`. Return the loss, a dict with the key `loss`, or None."
    )


def batch_outputs(output: Any, loss: Tensor | None) -> dict[str, Any]:
    """What `on_train_batch_end` gets, as under Trainer: a dict, whatever `training_step` returned."""
    outputs = dict(output) if isinstance(output, Mapping) else {}
    return outputs if loss is None else {**outputs, "loss": loss.detach()}


class TrainingStep(nn.Module):
    """A module whose forward is another's training step, for `functional_call`.

    Args:
        module: the other.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self._takes_batch_idx = takes_batch_idx(module)

    def forward(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        output = self.module.training_step(*((batch, batch_idx) if self._takes_batch_idx else (batch,)))
        loss = loss_of(output)
        if loss is None:
            raise TypeError("`training_step` returned None, and a stack of clients cannot skip a step one by one")
        return loss
