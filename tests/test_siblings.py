"""The method files as lessons: the same sections in the same order, shared parts identical, and diffs that show the idea."""
import ast
import difflib
from pathlib import Path

import pytest
from mutate import FAULTS

ROOT = Path(__file__).resolve().parent.parent
FIVE = ("eagle1", "eagle2", "eagle3", "dflash", "dflash2")
TRUNK = {"model", "verify", "train"}


def parts(name):
    """{top-level name or Class.method: source} in order."""
    source = (ROOT / f"{name}.py").read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.get_source_segment(source, node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{f.name}": ast.get_source_segment(source, f) for f in node.body if isinstance(f, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("name", FIVE)
def test_sections(name):
    """Docstring, Args, Drafter, train, generate, main, in this order; imports from the trunk and the five packages only."""
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    doc = ast.get_docstring(tree)
    assert all(word in doc for word in ("One round", "Glossary", f"python {name}.py --train", "Left out"))
    order = [n for n in parts(name) if n in ("Args", "Drafter", "train", "generate", "main")]
    assert order == ["Args", "Drafter", "train", "generate", "main"]
    imports = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imports |= {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert imports <= TRUNK | {"torch", "heapq", "math", "sys", "dataclasses", "functools"}


@pytest.mark.parametrize("name", sorted(TRUNK))
def test_trunk_knows_no_method(name):
    """No method's name occurs in the trunk's code."""
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {n.name for n in ast.walk(tree) if isinstance(n, ast.alias)}
    assert not words & set(FIVE)


@pytest.mark.parametrize("older, newer, same", [
    ("eagle1", "eagle2", ["Layer", "Drafter.advance", "Drafter.read", "Drafter.forward", "Drafter.cached", "Drafter.absorb",
                          "Drafter.step", "train", "generate", "main"]),
    ("eagle2", "eagle3", ["siblings", "Drafter.cached", "Drafter.draft", "Drafter.reset", "train", "generate", "main"]),
    ("dflash", "dflash2", ["heads", "Layer.inject", "Drafter.context", "Drafter.angles", "Drafter.block", "Drafter.absorb",
                           "Drafter.reset", "generate", "main"]),
])
def test_newer_file_differs_by_its_idea(older, newer, same):
    """The parts that a paper did not change are the same to the letter, and the parts that both have come in one order."""
    a, b = parts(older), parts(newer)
    for name in same:
        ratio = difflib.SequenceMatcher(None, a[name], b[name]).ratio()
        assert a[name] == b[name] or name == "Drafter.reset" and ratio > 0.95, name
    common = [n for n in a if n in b]
    assert common == [n for n in b if n in a]


def test_faults_of_the_mutation_check_apply():
    """Every fault stands once in the code: a check that applies nothing would find nothing."""
    assert all((ROOT / file).read_text().count(old) == 1 and old != new for file, old, new in FAULTS) and len(FAULTS) >= 60
