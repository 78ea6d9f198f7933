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
    """Return ``module`` as a compressed JSON value. Equal modules have equal values.

    Raises:
        ModelError: the graph has an op or an argument that cannot be sent. The message names the op.
    """
    return compressed(document_of(module))


def read_graph(data: object, *, run: bool = True) -> TracedModule:
    """Return the module in ``data``, a JSON value in the format of `write_graph`, compressed or not.

    Args:
        data: a JSON value from any source, trusted or not.
        run: whether to run the ops on meta tensors, to check that they return the tensors that the document states.
            Without it no op runs, so that a process that must not fail can call this function.

    Raises:
        GraphFormatError: ``data`` is no valid graph. The message names the place that is wrong.
    """
    module = read_document(parse_document(data))
    if run:
        check_runs(module)
    return module


def graph_digest(data: object) -> str:
    """Return a hash of the graph in ``data``. It is equal for both forms of the same JSON text, compressed and not.

    Raises:
        GraphFormatError: ``data`` is no form of a graph.
    """
    return hashlib.sha256(text_of(data)).hexdigest()
