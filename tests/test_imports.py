"""Imports of the package go one way: downwards in the order that CONTRIBUTING.md shows, and in no circle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = "kvarn_kernels"
DOORS = ("kvarn_hf", "kvarn_hf.pseudo_decode", "kvarn_hf.lm_eval")


class Import(NamedTuple):
    """Module ``importer`` imports module ``imported`` in this line."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


# --- The checker -----------------------------------------------------------------------------------------------------


def read_sources(*folders: Path) -> dict[str, str]:
    """Text of every module in these packages, by its dotted name."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def read_order(text: str) -> list[str]:
    """Rooms, the lowest first: first words of the fenced block ``text rooms``."""
    block = re.search(r"^```text rooms\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block, "CONTRIBUTING.md must have a fenced block 'text rooms'"
    return [line.split()[0] for line in block[1].splitlines()]


def imports_of(sources: dict[str, str]) -> list[Import]:
    """Every import between these modules, wherever it stands: in functions and under ``TYPE_CHECKING`` too."""
    return [
        Import(importer, imported, node.lineno)
        for importer, text in sources.items()
        for node in ast.walk(ast.parse(text))
        for imported in sorted(set(_imported(importer, node, sources)))
    ]


def _imported(importer: str, node: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Those of ``modules`` that a statement names; ``from package import name`` may mean a module ``name``."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        source = node.module or ""
        if node.level:
            is_package = any(module.startswith(f"{importer}.") for module in modules)
            parent = importer.split(".")[: len(importer.split(".")) - node.level + is_package]
            source = ".".join([*parent, *source.split(".")] if source else parent)
        names = [f"{source}.{alias.name}" for alias in node.names]
        names = [name if name in modules else source for name in names]
    else:
        return
    yield from (name for name in names if name in modules)


def room_of(module: str) -> str:
    """The room of a module: what follows ``kvarn_hf``, or the other package."""
    first, *rest = module.split(".")
    return rest[0] if first == "kvarn_hf" and rest else first


def circle_in(arrows: Iterable[tuple[str, str]]) -> list[str]:
    """One circle of these arrows, or nothing; an arrow from a thing to itself is none."""
    graph = defaultdict(set)
    for start, end in arrows:
        if start != end:
            graph[start].add(end)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def rooms_without_place(sources: dict[str, str], order: list[str]) -> set[str]:
    """Rooms that the order forgets, and those that it names but that are not there."""
    return {room_of(module) for module in sources if module not in DOORS} ^ set(order)


def upward_imports(imports: list[Import], order: list[str]) -> list[Import]:
    """Imports of a room from a higher one, or from a door, which is above all rooms."""
    height = {room: i for i, room in enumerate(order)}

    def rank(module: str) -> int:
        return len(order) if module in DOORS else height.get(room_of(module), len(order))

    return [x for x in imports if room_of(x.importer) != room_of(x.imported) and rank(x.importer) <= rank(x.imported)]


def kernel_imports(imports: list[Import]) -> list[Import]:
    """Imports across the border of the kernels, other than by ``ops``."""
    return [
        x
        for x in imports
        if room_of(x.importer) != "ops" and (room_of(x.importer) == KERNELS) != (room_of(x.imported) == KERNELS)
    ]


def definitions_in_doors(sources: dict[str, str]) -> list[str]:
    """What doors define themselves, other than ``__all__`` and the like."""
    found = []
    for door in DOORS:
        for node in ast.parse(sources.get(door, "")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else []
            found += [f"{door}:{node.lineno} defines {name}" for name in names if not re.fullmatch("__.*__", name)]
    return found


# --- The package -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return read_sources(ROOT / "kvarn_hf", ROOT / "kernels" / KERNELS)


@pytest.fixture(scope="module")
def imports(sources) -> list[Import]:
    return imports_of(sources)


@pytest.fixture(scope="module")
def order() -> list[str]:
    return read_order((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def listed(found: Iterable) -> str:
    return "\n".join(map(str, found))


def test_no_circle_between_modules(imports):
    circle = circle_in((x.importer, x.imported) for x in imports)
    assert not circle, " -> ".join(circle)


def test_no_circle_between_rooms(imports):
    circle = circle_in((room_of(x.importer), room_of(x.imported)) for x in imports)
    assert not circle, " -> ".join(circle)


def test_every_room_has_its_place(sources, order):
    assert len(order) == len(set(order))
    assert not rooms_without_place(sources, order)


def test_imports_go_downwards(imports, order):
    found = upward_imports(imports, order)
    assert not found, listed(found)


def test_only_ops_imports_the_kernels(imports):
    found = kernel_imports(imports)
    assert not found, listed(found)


def test_doors_define_nothing(sources):
    found = definitions_in_doors(sources)
    assert not found, listed(found)


# --- The checker, on made-up trees -----------------------------------------------------------------------------------


ORDER = [KERNELS, "state", "ops", "cache"]
GOOD = {
    "kvarn_hf": "from kvarn_hf.cache import Cache\n__all__ = ['Cache']\n",
    "kvarn_hf.cache": "import torch\nfrom kvarn_hf import ops\nfrom kvarn_hf.state import tiles\n",
    "kvarn_hf.ops": "def f():\n    from kvarn_kernels.append import pack\n",
    "kvarn_hf.state": "",
    "kvarn_hf.state.tiles": "from .padding import Padding\n",
    "kvarn_hf.state.padding": "",
    "kvarn_kernels": "from kvarn_kernels.append import pack\n",
    "kvarn_kernels.append": "import triton\n",
}


def problems(**changes: str) -> list[str]:
    """All that is wrong with the good tree after some modules of the package were changed."""
    sources = GOOD | {(f"kvarn_hf.{name}" if name else "kvarn_hf"): text for name, text in changes.items()}
    imports = imports_of(sources)
    found = [f"no place: {room}" for room in rooms_without_place(sources, ORDER)]
    found += [f"upward: {x}" for x in upward_imports(imports, ORDER)]
    found += [f"kernels: {x}" for x in kernel_imports(imports)]
    for arrows in ([(x.importer, x.imported) for x in imports], [(room_of(x[0]), room_of(x[1])) for x in imports]):
        found += [" -> ".join(circle)] if (circle := circle_in(arrows)) else []
    return found + definitions_in_doors(sources)


def test_a_good_tree_has_no_problems():
    assert problems() == []
    assert [str(x) for x in imports_of(GOOD)] == [
        "kvarn_hf:1 imports kvarn_hf.cache",
        "kvarn_hf.cache:2 imports kvarn_hf.ops",
        "kvarn_hf.cache:3 imports kvarn_hf.state.tiles",
        "kvarn_hf.ops:2 imports kvarn_kernels.append",
        "kvarn_hf.state.tiles:1 imports kvarn_hf.state.padding",
        "kvarn_kernels:1 imports kvarn_kernels.append",
    ]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("state.padding", "from kvarn_hf.state.tiles import Tiles\n"),
        ("state.padding", "import kvarn_hf.state.tiles\n"),
        ("state.padding", "from . import tiles\n"),
        ("state.padding", "from .tiles import Tiles\n"),
        ("state.padding", "from ..state import tiles\n"),
        ("state.padding", "if TYPE_CHECKING:\n    from kvarn_hf.state.tiles import Tiles\n"),
        ("state.padding", "def f():\n    from kvarn_hf.state import tiles\n"),
    ],
)
def test_a_circle_between_modules_is_seen(module, text):
    (found,) = problems(**{module: text})
    assert found in (
        "kvarn_hf.state.tiles -> kvarn_hf.state.padding -> kvarn_hf.state.tiles",
        "kvarn_hf.state.padding -> kvarn_hf.state.tiles -> kvarn_hf.state.padding",
    )


def test_a_circle_between_rooms_is_seen_where_no_modules_make_one():
    found = problems(**{"state.padding": "from kvarn_hf import ops\n", "ops": "from kvarn_hf import state\n"})
    assert found[0] == "upward: kvarn_hf.state.padding:1 imports kvarn_hf.ops"
    assert found[1] in ("ops -> state -> ops", "state -> ops -> state")
    assert len(found) == 2


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("ops", "from kvarn_hf.cache import Cache\n", "upward: kvarn_hf.ops:1 imports kvarn_hf.cache"),
        ("state.tiles", "\nfrom .. import ops\n", "upward: kvarn_hf.state.tiles:2 imports kvarn_hf.ops"),
        ("cache", "from kvarn_hf import __version__\n", "upward: kvarn_hf.cache:1 imports kvarn_hf"),
        ("cache", "from kvarn_hf.lm_eval import main\n", "upward: kvarn_hf.cache:1 imports kvarn_hf.lm_eval"),
        ("cache", "import kvarn_kernels\n", "kernels: kvarn_hf.cache:1 imports kvarn_kernels"),
        ("state", "from kvarn_kernels import append\n", "kernels: kvarn_hf.state:1 imports kvarn_kernels.append"),
        ("extra.thing", "", "no place: extra"),
        ("pseudo_decode", "def f():\n    pass\n", "kvarn_hf.pseudo_decode:1 defines f"),
        ("pseudo_decode", "BLOCK = 1\n", "kvarn_hf.pseudo_decode:1 defines BLOCK"),
    ],
)
def test_every_kind_of_problem_is_seen(module, text, found):
    assert found in problems(**{"lm_eval": "", module: text})


def test_kernels_import_nothing_of_the_package():
    imports = imports_of(GOOD | {"kvarn_kernels.append": "from kvarn_hf.state import tiles\n"})
    expected = ["kvarn_kernels.append:1 imports kvarn_hf.state.tiles"]
    assert [str(x) for x in kernel_imports(imports)] == [str(x) for x in upward_imports(imports, ORDER)] == expected


def test_the_order_is_read_from_its_block():
    assert read_order("```text rooms\nlow   what it is\nhigh  what it is\n```\n") == ["low", "high"]
    with pytest.raises(AssertionError, match="must have a fenced block"):
        read_order("```text\nlow\n```\n")


def test_modules_are_named_as_they_are_imported(tmp_path):
    for name in ("__init__", "cache", "state/__init__", "state/tiles"):
        path = tmp_path / "kvarn_hf" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}")
    assert read_sources(tmp_path / "kvarn_hf") == {
        "kvarn_hf": "# __init__",
        "kvarn_hf.cache": "# cache",
        "kvarn_hf.state": "# state/__init__",
        "kvarn_hf.state.tiles": "# state/tiles",
    }
