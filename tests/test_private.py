"""Private names of other packages are reached through one module, and each has a canary."""

import ast
from pathlib import Path

import lightning_feddua
from lightning_feddua import _private

PACKAGE = Path(lightning_feddua.__file__).parent


def test_every_name_has_a_canary():
    own = ast.parse((PACKAGE / "_private.py").read_text())
    functions = {node.name for node in own.body if isinstance(node, ast.FunctionDef)}
    # What only the others use is tried with them.
    names = {name for name in functions if not name.startswith("_")} | set(_private.__all__)
    names |= {name for name in vars(_private) if name.isupper()}
    files = sorted(Path(__file__).parent.glob("test_private*.py"))
    trees = [ast.parse(path.read_text()) for path in files]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert len(names) > 30
    assert names <= used


def private_names(path):
    """Private names in a file: attributes, keywords, and what is imported from other packages."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_feddua"):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_no_other_file_reaches_for_private_names():
    known = private_names(PACKAGE / "_private.py")
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py") if path.name != "_private.py"}
    # What a module's base classes call is defined under their names.
    allowed = {"host/strategy_view.py": {_private.STRATEGY_OPTIMIZERS}}
    found = {name: private_names(path) & known - allowed.get(name, set()) for name, path in files.items()}
    assert {name: names for name, names in found.items() if names} == {}
