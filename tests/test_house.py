"""The house: rooms of a size that can be read, each saying what it is for, and no circle among modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "benchmarks", "cost_model", "executor", "planner")
ROOMS = [
    file.parent
    for package in PACKAGES
    if package != "benchmarks"
    for file in sorted((ROOT / package).rglob("__init__.py"))
    if file.parent.parent != ROOT and not {"migrations", "routes"} & set(file.parts)
]
MOST_MODULES, MOST_LINES = 18, 400


def folders() -> list[Path]:
    found = [ROOT / package for package in PACKAGES]
    found += [folder for package in found for folder in package.rglob("*") if folder.is_dir()]
    return sorted(folder for folder in found if any(folder.glob("*.py")))


def modules() -> list[Path]:
    return [file for folder in folders() for file in sorted(folder.glob("*.py"))]


def name_of(file: Path) -> str:
    """Return the name by which other modules import ``file``; benchmarks are scripts with their folder on the path."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "benchmarks" else parts
    return ".".join(parts).removesuffix(".__init__")


def imported_by(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_holds_no_more_than_a_reader_can_overlook(folder: Path) -> None:
    count = len([file for file in folder.glob("*.py") if file.name != "__init__.py"])
    assert count <= MOST_MODULES


def test_no_module_is_too_long() -> None:
    too_long = {name_of(file): n for file in modules() if (n := len(file.read_text().splitlines())) > MOST_LINES}
    assert not too_long


def test_every_room_says_what_it_is_for_and_every_module_what_it_gives() -> None:
    silent = [str(file.relative_to(ROOT)) for file in modules() if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not silent


@pytest.mark.parametrize("package", ["api", "cost_model", "executor", "planner"])
def test_a_package_lists_its_rooms(package: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""
    rooms = {folder.name for folder in (ROOT / package).iterdir() if (folder / "__init__.py").exists()}
    assert set(re.findall(r"^(\w+)/", text, re.MULTILINE)) == rooms


def signs(room: Path) -> Iterator[tuple[str, str]]:
    """Yield (module or file, name in it) of the table "what, where" in the docstring of ``room``."""
    for line in (ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or "").splitlines():
        cells = re.split(r"\s{2,}", line)
        module = ""
        for place in cells[1].split(", ") if len(cells) == 2 else []:
            head, _, name = place.partition(".")
            module = place if place.endswith(".toml") else head or module
            yield module, "" if place == module else name


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_points_to_what_others_use(room: Path) -> None:
    found = list(signs(room))
    assert found
    for module, name in found:
        file = room / module if (room / module).exists() else room / f"{module}.py"
        assert file.exists(), f"{module} is not in {room}"
        if name:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
            defined = {getattr(node, "name", None) or getattr(node, "id", None) for node in nodes}
            assert set(name.split(".")) <= defined, f"{file} defines no {name}"


def test_no_module_imports_itself_through_others() -> None:
    names = {name_of(file) for file in modules()}
    graph = networkx.DiGraph(
        (name_of(file), other) for file in modules() for other in imported_by(file) if other in names
    )
    graph.remove_edges_from(list(networkx.selfloop_edges(graph)))
    assert not [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
