"""A graph split into pipeline stages, between the blocks of its one list of blocks.

The first stage also runs the ops before the first block, the last stage the ops after the last block. Ops that depend
on no parameter (masks, positions, shifted labels) are cheap and run again in every stage that needs them. Every stage
gets the model's inputs that it reads. Every other tensor that a stage reads from the stage before it is a boundary
tensor: an output of the earlier stage and an input of the later one. Its gradient is sent back.

A rank of an interleaved pipeline runs several stages, all in one graph. Each stage has its own boundary tensors. Ops
that depend on no parameter are in the graph once, although each stage runs them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from planner.graph.op_graph import Crossing, ModelInput, ModelOutput, Op, OpGraph, build_digraph
from planner.regions.blocks import Blocks
from planner.regions.regions import block_of

PATH = "pipeline"
"""First part of a boundary tensor's path. The second part is its number, which every stage counts from 0."""


def obstacle(graph: OpGraph, blocks: Blocks, *, ends_alone: bool = False) -> str | None:
    """Return the reason why a model cannot be split into pipeline stages; None if it can.

    Args:
        ends_alone: whether the first or the last stage may have no block, only the ops before or after all blocks.
    """
    if len(blocks.lists) != 1:
        return f"it has {len(blocks.lists) or 'no'} lists of repeated blocks, and exactly one can be split"
    (block_names,) = blocks.lists.values()
    stage_of = {block: number for number, block in enumerate(block_names, start=int(ends_alone))}
    stages_of_ops = _StagesOfOps.of(graph, stage_of, len(block_names) + 1 if ends_alone else len(block_names) - 1)
    if stages_of_ops is None:
        return "its blocks do not run one after the other"
    users: dict[str, set[int]] = {}
    for op in graph.ops:
        for value in op.inputs:
            for stage in stages_of_ops.stages[op.name]:
                users.setdefault(value, set()).add(stage)
    for value, names in graph.parameters.items():
        if len(users.get(value, ())) > 1:
            return f"{names[0]} is used at both ends of the model, or in several blocks"
    for value, stages in users.items():
        home = stages_of_ops.stage_of_value.get(value)
        if home is not None and max(stages) > home + 1:
            return "a block reads what another than the one before it computes"
    if not any(output.is_loss for output in graph.outputs):
        return "its forward returns no loss"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagesOfOps:
    """The stages that run each op.

    Attributes:
        stages: op -> stages that run it; several only if the op depends on no parameter.
        stage_of_value: value -> stage that computes it. Values that depend on no parameter are left out.
    """

    stages: Mapping[str, frozenset[int]]
    stage_of_value: Mapping[str, int]

    @classmethod
    def of(cls, graph: OpGraph, stage_of: Mapping[str, int], last: int) -> _StagesOfOps | None:
        """Return the stages of ops, given the stage of each block; None if the blocks do not run in that order.

        Args:
            last: the stage that runs the ops after all blocks.
        """
        running, own, stage_of_value = 0, dict[str, int](), dict[str, int]()
        blocks = [block_of(graph.calls[op.call].fqn) or "" for op in graph.ops]
        after = 1 + max((position for position, block in enumerate(blocks) if block in stage_of), default=-1)
        for position, (op, block) in enumerate(zip(graph.ops, blocks, strict=True)):
            running_here = last if position >= after else stage_of.get(block, running)
            if running_here < running:
                return None
            running = running_here
            own[op.name] = running
            if any(value in stage_of_value or value in graph.parameters for value in op.inputs):
                stage_of_value.update(dict.fromkeys(op.outputs, running))
        stages: dict[str, frozenset[int]] = {}
        reader_stages: dict[str, set[int]] = {}
        for op in reversed(graph.ops):
            free = op.outputs[0] not in stage_of_value
            readers = {stage for value in op.outputs for stage in reader_stages.get(value, ())}
            stages[op.name] = frozenset(readers if free and readers else {own[op.name]})
            for value in op.inputs:
                if value not in stage_of_value:
                    reader_stages.setdefault(value, set()).update(stages[op.name])
        return cls(stages=stages, stage_of_value=stage_of_value)


def split(graph: OpGraph, blocks: Blocks, counts: Sequence[int], *which: int) -> OpGraph:
    """Return the graph of one stage of a graph that has no `obstacle`, or of several stages on one rank.

    Args:
        counts: number of blocks of each stage; 0 is allowed for the first and the last.
        which: the stages to return, counted from 0, in ascending order. No two of them are adjacent.
    """
    (block_names,) = blocks.lists.values()
    assert sum(counts) == len(block_names)
    assert all(after > stage + 1 for stage, after in itertools.pairwise(which))
    numbers = [stage for stage, count in enumerate(counts) for _ in range(count)]
    stages_of_ops = _StagesOfOps.of(graph, dict(zip(block_names, numbers, strict=True)), len(counts) - 1)
    assert stages_of_ops is not None
    return _graph_of_stages(graph, stages_of_ops, which, len(counts))


def _graph_of_stages(graph: OpGraph, stages_of_ops: _StagesOfOps, which: Sequence[int], stages: int) -> OpGraph:
    ops = [op for op in graph.ops if not stages_of_ops.stages[op.name].isdisjoint(which)]
    received = [_boundary_values(graph, stages_of_ops, stage - 1) for stage in which if stage]
    sent = [_boundary_values(graph, stages_of_ops, stage) for stage in which if stage < stages - 1]
    paths = {value: f"{PATH}.{number}" for values in received for number, value in enumerate(values)}
    ops = [_receiving(graph, op, paths) for op in ops]
    op_inputs = {value for op in ops for value in op.inputs}
    op_outputs = {value for op in ops for value in op.outputs}
    values = {name: value for name, value in graph.values.items() if name in op_inputs or name in op_outputs}
    for name in paths:
        values[name] = dataclasses.replace(values[name], kind="input")
    inputs = [model_input for model_input in graph.inputs if model_input.value in op_inputs]
    inputs += [ModelInput(value=value, path=path) for value, path in paths.items()]
    outputs = [
        output
        for output in graph.outputs
        if output.value in op_outputs and stages_of_ops.stage_of_value.get(output.value) in which
    ]
    return OpGraph(
        digraph=build_digraph(ops),
        values=values,
        calls=graph.calls,
        inputs=tuple(inputs),
        outputs=(*outputs, *(output for values in sent for output in _sent(values))),
        parameters={value: names for value, names in graph.parameters.items() if value in op_inputs},
        rounded=graph.rounded,
    )


def _boundary_values(graph: OpGraph, stages_of_ops: _StagesOfOps, stage: int) -> tuple[str, ...]:
    """Return the values that a stage computes and the next one reads, in the order of computation."""
    stage_inputs: AbstractSet[str] = {
        value for op in graph.ops if stage + 1 in stages_of_ops.stages[op.name] for value in op.inputs
    }
    return tuple(
        value
        for op in graph.ops
        for value in op.outputs
        if value in stage_inputs and stages_of_ops.stage_of_value.get(value) == stage
    )


def _sent(values: Sequence[str]) -> Iterator[ModelOutput]:
    for number, value in enumerate(values):
        path = f"{PATH}.{number}"
        crossing = Crossing(call=0, direction="output", path=path)
        yield ModelOutput(value=value, path=path, crossings=(crossing,), is_loss=False, is_sent=True)


def _receiving(graph: OpGraph, op: Op, paths: Mapping[str, str]) -> Op:
    """Return ``op`` with crossings that bring boundary tensors in as arguments of the root module."""
    if not any(value in paths for value in op.inputs):
        return op
    crossings = tuple(
        _from_root(graph, op, row, paths[value]) if value in paths else row
        for value, row in zip(op.inputs, op.crossings, strict=True)
    )
    return dataclasses.replace(op, crossings=crossings)


def _from_root(graph: OpGraph, op: Op, row: tuple[Crossing, ...], path: str) -> tuple[Crossing, ...]:
    """Return the crossings from an argument of the root module to ``op``; ``row``: those from the value's producer."""
    inward = next((i for i, crossing in enumerate(row) if crossing.direction == "input"), len(row))
    inner_crossings = row[inward:]
    frame: int | None = graph.calls[inner_crossings[0].call].parent if inner_crossings else op.call
    around = []
    while frame is not None:
        around.append(frame)
        frame = graph.calls[frame].parent
    return (*(Crossing(call=call, direction="input", path=path) for call in reversed(around)), *inner_crossings)
