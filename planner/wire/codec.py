"""Graphs over the wire: a traced module as a JSON value and back.

What is sent is the graph of ops with names and sizes: no code, and no weights. What is read is data: nothing is
unpickled or imported, and only ops of a fixed list are looked up. See ``docs/reference/graph-format.md``.
"""

from __future__ import annotations

import hashlib

from planner.graph.trace_module import TracedModule
from planner.wire.decode import read_document
from planner.wire.document import compressed, parse_document, text_of
from planner.wire.encode import document_of
from planner.wire.replay import check_runs


def write_graph(module: TracedModule) -> dict[str, str]:
    """Return the JSON value of ``module``, compressed: the same for the same module.

    Raises:
        ModelError: its graph holds what cannot be sent; names the op.
    """
    return compressed(document_of(module))


def read_graph(data: object, *, run: bool = True) -> TracedModule:
    """Return the module in ``data``, a JSON value as `write_graph` makes it, compressed or not.

    Args:
        data: from anywhere.
        run: whether its ops are run, on meta tensors, to see that they make what the document says. Without this only
            what can be read off is checked: fit for a process that is not to be risked.

    Raises:
        GraphFormatError: it is no graph; names the place that is wrong.
    """
    module = read_document(parse_document(data))
    if run:
        check_runs(module)
    return module


def graph_digest(data: object) -> str:
    """Return a hash of the graph in ``data``, equal for its forms where they hold the same text.

    Raises:
        GraphFormatError: it is neither form of a graph.
    """
    return hashlib.sha256(text_of(data)).hexdigest()
