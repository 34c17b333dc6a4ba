import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
import helpers


def pytest_addoption(parser):
    parser.addoption("--method", action="append", default=[], metavar="FILE",
                     help="a method's file in any folder: tested as those in the root are (with -k NAME: alone)")


def pytest_configure(config):
    for file in map(Path, config.getoption("--method")):
        if not file.is_file():
            pytest.exit(f"--method {file}: no such file", 2)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        helpers.METHODS.append(file.stem)
