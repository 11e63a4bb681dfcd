import pytest

from lightning_feddua import FederatedLoop


@pytest.fixture
def make_skipping_loop(tmp_path):
    def make(**arguments):
        defaults = {"max_rounds": 3, "local_steps": 3, "on_client_error": "skip"}
        fixed = {"out_dir": tmp_path, "enable_progress_bar": False, "accelerator": "cpu"}
        return FederatedLoop(**{**defaults, **fixed, **arguments})

    return make
