"""What the README names exists: symbols beside equations, files, flags, and the two markers that are filled in by commands."""
import functools
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = {f.stem: importlib.import_module(f.stem) for f in ROOT.glob("*.py")}
SYMBOLS = sorted(set(re.findall(rf"`((?:{'|'.join(MODULES)})\.(?!py\b)[\w.]+)`", README)))


def test_every_file_has_its_equations():
    """The table names something in every method, in verify.py and in model.py."""
    assert {s.split(".")[0] for s in SYMBOLS} >= set(MODULES) - {"train"}


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_symbols_exist(symbol):
    name, *path = symbol.split(".")
    functools.reduce(getattr, path, MODULES[name])


def test_files_exist():
    """Links, pictures, and every file that a command line names; idea.py is the reader's own."""
    linked = re.findall(r"\]\(([^)#:]+)\)", README)
    commanded = re.findall(r"(?:python|diff) ([\w/]+\.py)", README) + re.findall(r"diff \w+\.py (\w+\.py)", README)
    missing = [f for f in linked + commanded if f != "idea.py" and not (ROOT / f).exists()]
    assert linked and commanded and not missing


def test_flags_exist():
    """Every --flag belongs to a command, to a script in tests/, or to one of the tools that the README calls."""
    known = {f.name for m in MODULES.values() if hasattr(m, "Args") for f in fields(m.Args)} | {"nproc_per_node", "help"}
    for script in ("compare.py", "ablate.py", "mutate.py", "conftest.py"):
        known |= set(re.findall(r'"--([\w-]+)"', (ROOT / "tests" / script).read_text()))
    assert set(re.findall(r"--(\w[\w-]*)", README)) <= known


@pytest.mark.parametrize("marker", ["table", "ablations"])
def test_markers_stand_once(marker):
    before, after = README.index(f"<!-- {marker} -->"), README.index(f"<!-- /{marker} -->")
    assert before < after and README.count(f"<!-- {marker} -->") == README.count(f"<!-- /{marker} -->") == 1
