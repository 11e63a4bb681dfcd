"""What is true of the files themselves: their length, paths in them, and versions that are written twice."""

import re
from pathlib import Path

import pytest
import yaml

from lightning_feddua import __version__

ROOT = Path(__file__).parent.parent
PYTHON = [path for folder in ("lightning_feddua", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
TEXT = [
    *PYTHON,
    *(path for pattern in ("*.md", "*.toml", "*.cff", ".*.yaml", ".ci/*", "docs/*.md") for path in ROOT.glob(pattern)),
    *(path for pattern in ("recipes/*.yaml", ".github/**/*.*") for path in ROOT.glob(pattern)),
]
# From here on they have to be split.
LONGEST = {"lightning_feddua": 300, "tests": 350}


@pytest.mark.parametrize("folder", LONGEST)
def test_no_file_is_too_long(folder):
    lines = {path: len(path.read_text().splitlines()) for path in PYTHON if path.is_relative_to(ROOT / folder)}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > LONGEST[folder]} == {}


def test_no_file_names_a_folder_of_one_machine():
    folder = re.compile(r"/(?:work|root|home/\w+|Users/\w+|tmp/\w+)/")
    found = {str(path.relative_to(ROOT)): match[0] for path in TEXT if (match := folder.search(path.read_text()))}
    assert found == {}


def test_the_citation_has_the_version_of_the_package():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_the_workflow_tries_what_the_package_allows():
    project = (ROOT / "pyproject.toml").read_text()
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["fast"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f'requires-python = ">={matrix["python"][0]}"' in project
    for pinned in matrix["include"]:
        for name, version in re.findall(r"(\w+)==([\d.]+)", pinned["versions"]):
            (lowest,) = re.findall(rf'^  "{name}>=([\d.]+)', project, re.MULTILINE)
            assert version in (lowest, f"{lowest}.0")
