import pytest

# For the values in a failed assertion.
pytest.register_assert_rewrite("tests.packages.harness")


def pytest_ignore_collect(collection_path, config):
    """The packages take a minute to import, so only a run of the slow tests imports them."""
    return True if config.option.markexpr == "not slow" else None


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Several packages write logs to the current folder."""
    monkeypatch.chdir(tmp_path)
