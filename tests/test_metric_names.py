import pytest

from lightning_feddua import FederatedLoop
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.metric_names import CERTIFICATE, LOOP_COLUMNS, best_mode, large_is_worse
from lightning_feddua.models import LinearRegression


@pytest.mark.parametrize(
    "name",
    [
        *(
            "loss",
            "val_loss",
            "valLoss",
            "val/loss",
            "val_loss_epoch",
            "loss2",
            "val_top5_error",
            "val_err",
            "weight_error",
        ),
        *("val_mse", "MSELoss", "valRMSE", "test-mae", "val_mape", "val_smape", "val_nll", "val_ppl", "Perplexity"),
        *("val_wer", "val_cer", "val_ece", "val_fid", "val_brier", "val_cross_entropy", "val_loss/mean", "neg_elbo"),
    ],
)
def test_smaller_is_better(name):
    assert large_is_worse(name)


@pytest.mark.parametrize(
    "name",
    [
        *("val_acc", "val_cancer_acc", "val_answer_acc", "val_power", "val_lower_bound", "val_lossless", "val_mauve"),
        *("val_soccer_f1", "val_acc_per_class", "AUROC", "val_terrain_iou", "valR2", "neg_mean_squared_error"),
    ],
)
def test_larger_is_better(name):
    assert not large_is_worse(name)


def test_what_was_asked_for_comes_first():
    assert (best_mode("val_loss"), best_mode("val_loss", "max")) == ("min", "max")
    assert (best_mode("val_acc"), best_mode("val_acc", "min")) == ("max", "min")


def test_the_loop_writes_these_columns_and_what_the_module_logs(tmp_path):
    loop = FederatedLoop(
        max_rounds=1,
        local_steps=1,
        on_client_error="skip",
        precision="64-true",
        accelerator="cpu",
        out_dir=tmp_path,
        enable_progress_bar=False,
    )
    loop.fit(LinearRegression(dim=4), SyntheticRegression(num_clients=2, dim=4))
    logged = {"loss", "val_loss", "last_iterate/val_loss"}
    assert loop.history[0].keys() - logged == LOOP_COLUMNS - {CERTIFICATE}
    header = (loop.run_dir / "metrics.csv").read_text().splitlines()[0].split(",")
    assert set(header) - logged == LOOP_COLUMNS
