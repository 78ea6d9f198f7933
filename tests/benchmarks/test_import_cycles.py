"""Imports among the benchmarks: no cycle, and one way through the rooms of ``published``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROOMS = ("fit", "pricing", "frameworks", "rows")
"""Rooms of ``published``, top to bottom."""


def import_graph() -> nx.DiGraph[str]:
    """Return the modules of benchmarks/ and their imports of each other, those inside functions included."""
    modules = {".".join(file.relative_to(BENCHMARKS).with_suffix("").parts): file for file in BENCHMARKS.rglob("*.py")}
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(modules)
    for name, file in modules.items():
        for imported in imported_names(ast.parse(file.read_text(encoding="utf-8"))):
            if imported in modules:
                graph.add_edge(name, imported)
    return graph


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield every dotted name that may be an imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_benchmarks_have_no_import_cycle() -> None:
    graph = import_graph()
    assert graph.has_edge("search", "draw_search")
    assert list(nx.simple_cycles(graph)) == []


def test_rooms_of_published_import_one_way() -> None:
    for importer, imported in import_graph().edges:
        one, other = importer.split("."), imported.split(".")
        if one[0] == other[0] == "published" and len(one) > 2 and len(other) > 2:
            assert ROOMS.index(one[1]) <= ROOMS.index(other[1]), f"{importer} imports {imported}"


def test_no_folder_has_more_than_18_modules() -> None:
    for folder in {file.parent for file in BENCHMARKS.rglob("*.py")}:
        assert len(list(folder.glob("*.py"))) <= 18, folder
