"""The method files as lessons: the same sections in the same order, imports from the trunk alone, and short diffs."""
import ast
from pathlib import Path

import pytest

FIVE, TRUNK = ("eagle1", "eagle2", "eagle3", "dflash", "dflash2"), ("model", "verify", "train")
ROOT = Path(__file__).resolve().parent.parent
SOURCE = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in FIVE + TRUNK}


@pytest.mark.parametrize("name", SOURCE)
def test_sections_and_imports(name):
    """A method has its sections in order and imports no other method; the trunk does not even know their names."""
    tree = ast.parse(SOURCE[name])
    if name in FIVE:
        assert all(word in ast.get_docstring(tree) for word in ("One round", "Glossary", "Left out"))
        sections = ["Args", "Drafter", "train", "generate", "main"]
        assert [n.name for n in tree.body if getattr(n, "name", None) in sections] == sections
        imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not imported & set(FIVE) and set(TRUNK) <= imported
    else:
        words = {v for n in ast.walk(tree) for _, v in ast.iter_fields(n) if isinstance(v, str) and " " not in v}
        assert not [word for word in words if "eagle" in word.lower() or "dflash" in word.lower()]


@pytest.mark.parametrize("older, newer, most", [(*FIVE[:2], 100), (*FIVE[1:3], 110), (*FIVE[3:], 130)])
def test_a_diff_shows_the_idea_alone(older, newer, most):
    """Changed lines, as `diff older newer | grep -c '^[<>]'` counts them: all that are in no common subsequence."""
    a, b = SOURCE[older].splitlines(), SOURCE[newer].splitlines()
    common = [0] * (len(b) + 1)
    for x in a:
        above, common = common, [0]
        for i, y in enumerate(b):
            common.append(above[i] + 1 if x == y else max(above[i + 1], common[i]))
    assert len(a) + len(b) - 2 * common[-1] <= most
