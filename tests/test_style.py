"""The product stays short, and says what it does: lengths of functions and files, lines in all, docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("kvarn_hf", "kernels", "tools", "eval", "notebooks")

MOST_LINES = 14_800
MEDIAN_OF_FUNCTION, MOST_OF_FUNCTION, MOST_OF_FILE = 8, 120, 450

# A kernel is one function to the compiler: what it calls is inlined, and every part would need all of its registers as
# arguments.
LONG_KERNELS = {"split_kernel", "_attend_tiles", "_attend_dense"}

LONG_FILES = {
    "kernels/kvarn_kernels/attention_kernels.py": "two kernels and the parts they share",
    "kernels/kvarn_kernels/dequantize.py": "one kernel for sinks, tiles and tail, with a path for every width",
    "kernels/kvarn_kernels/quantize.py": "one kernel from the rotation to the packed bytes, for keys and for values",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Measured(NamedTuple):
    """A function and its number of lines."""

    lines: int
    file: str
    name: str


def length_of(function: Function) -> int:
    """Last line minus first line plus one, without decorators and docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Every function, inside of others and of classes too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def without_docstring(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Names of the public functions, classes and methods in ``node`` that have none."""
    for child in node.body:
        setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in getattr(child, "decorator_list", ()))
        if isinstance(child, (Function, ast.ClassDef)) and not child.name.startswith("_") and not setter:
            if ast.get_docstring(child) is None:
                yield child.name
            if isinstance(child, ast.ClassDef):
                yield from (f"{child.name}.{name}" for name in without_docstring(child))


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Text of every file of the product, by its path."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def functions(files) -> list[Measured]:
    """Every function of the product, the longest first."""
    measured = (
        Measured(length_of(f), file, f.name) for file, text in files.items() for f in functions_in(ast.parse(text))
    )
    return sorted(measured, reverse=True)


def test_functions_are_short(functions):
    assert median(function.lines for function in functions) <= MEDIAN_OF_FUNCTION
    long = [function for function in functions if function.lines > MOST_OF_FUNCTION]
    assert not [function for function in long if function.name not in LONG_KERNELS]


def test_files_are_short(files):
    lines = {file: text.count("\n") for file, text in files.items()}
    assert not {file: n for file, n in lines.items() if n > MOST_OF_FILE and file not in LONG_FILES}


def test_there_is_no_more_than_needed(files):
    assert sum(text.count("\n") for text in files.values()) <= MOST_LINES


def test_everything_public_has_a_docstring(files):
    missing = [f"{file}: {name}" for file, text in files.items() for name in without_docstring(ast.parse(text))]
    assert not missing, "\n".join(missing)


EXAMPLE = '''
@decorated
def one():
    """Two
    lines."""
    a = 1
    def inner(): pass
    return a

class Public:
    def method(self): pass
    def _private(self): pass
    @property
    async def there(self):
        """Is."""

class _Private:
    def method(self): pass
'''


def test_how_it_is_measured():
    tree = ast.parse(EXAMPLE)
    lengths = [(f.name, length_of(f)) for f in functions_in(tree)]
    assert sorted(lengths) == [("_private", 1), ("inner", 1), ("method", 1), ("method", 1), ("one", 4), ("there", 1)]
    assert list(without_docstring(tree)) == ["Public", "Public.method"]
