"""`OpOrder`: the ops in execution order, the tensors that each reads and saves, and the gradients at its backward."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping

from planner.graph.op_graph import Op
from planner.plan.job import CheckpointingMode
from planner.profile.op_profile import GraphProfile
from planner.regions.blocks import Blocks
from planner.regions.regions import RegionGraph

NEVER = 1 << 60
"""A position after every op."""


class OpOrder:
    """The ops of a graph by position, and by block.

    Attributes:
        position: op name -> position of the op in execution order.
        region_op: position -> (region, op of the region).
        ops_in_block: FQN of a block -> positions of its ops, in order.
        starts, ends: FQN of a block -> position of its first op, and of its last.
        gradients: position -> values (roots) whose gradients, from later ops, are alive when the op's backward starts.
        aliased_gradients: position -> values (roots) whose gradients are alive in the memory of another gradient.
        chunks: positions at which the chunks of an interleaved pipeline stage begin, without the first chunk.
    """

    def __init__(
        self, regions: RegionGraph, profile: GraphProfile, blocks: Blocks, modes: Mapping[str, CheckpointingMode]
    ) -> None:
        """Take the saved tensors of ops from ``profile``; ``modes``: FQN of a checkpointed block -> its mode."""
        self.regions, self.profile, self.modes = regions, profile, modes
        self._blocks = blocks
        self.ops: list[Op] = regions.graph.ops
        self.position = {op.name: position for position, op in enumerate(self.ops)}
        self.region_op = {self.position[r.op.name]: (region, r) for region in regions.regions for r in region.ops}
        inside: dict[str, list[int]] = defaultdict(list)
        for position, (region, _) in sorted(self.region_op.items()):
            block = blocks.of_region.get(region.index)
            if block is not None:
                inside[block].append(position)
        self.ops_in_block = dict(inside)
        self.starts = {block: positions[0] for block, positions in inside.items()}
        self.ends = {block: positions[-1] for block, positions in inside.items()}
        self.gradients: dict[int, tuple[str, ...]] = {}
        self.aliased_gradients: dict[int, frozenset[str]] = {}
        self.chunks: tuple[int, ...] = tuple(self._find_chunks())
        self._follow_gradients()

    @property
    def is_forward(self) -> bool:
        """Whether no op has a backward, because the model was traced for inference."""
        return not any(value.requires_grad for value in self.regions.graph.values.values())

    def block(self, region: int) -> str | None:
        """Return the checkpointed block that a region is in; None: it is in none."""
        block = self._blocks.of_region.get(region)
        return block if block in self.modes else None

    def block_of_op(self, position: int) -> str | None:
        """Return the block, checkpointed or not, that an op is in; None: it is in none."""
        return self._blocks.of_region.get(self.region_op[position][0].index)

    def root(self, name: str) -> str:
        """Return the root of a value: the first value with the same storage."""
        return self.profile.root.get(name, name)

    def saves(self, op: Op) -> bool:
        """Return whether autograd saves any tensor for an op's backward."""
        profile = self.profile.ops[op.name]
        return bool(profile.saved or profile.saved_extra_nbytes)

    def reads(self, position: int) -> set[str]:
        """Return the roots of the values that an op reads."""
        return {self.root(name) for name in self.ops[position].inputs}

    def is_view(self, position: int) -> bool:
        """Return whether all results of an op share the storage of its inputs."""
        return all(self.root(name) in self.reads(position) for name in self.ops[position].outputs)

    def has_backward(self, op: Op) -> bool:
        """Return whether an op has a backward."""
        return any(self.regions.graph.values[name].requires_grad for name in op.outputs)

    def passes_gradient_on(self, op: Op) -> bool:
        """Return whether an op's backward returns its output's gradient as the inputs' gradients, without a copy."""
        return self.profile.ops[op.name].nbytes == 0 or op.target_name in ("aten.add.Tensor", "aten.alias.default")

    def new_gradients(self, op: Op) -> list[str]:
        """Return the roots of the values for which the backward of ``op`` allocates a gradient, without parameters."""
        values = self.regions.graph.values
        if self.passes_gradient_on(op):
            return []
        return [self.root(n) for n in op.inputs if values[n].requires_grad and values[n].kind != "parameter"]

    def _find_chunks(self) -> Iterator[int]:
        """Yield the positions at which chunks begin: an op reads a received value first, after a value was sent."""
        graph = self.regions.graph
        sent = {output.value for output in graph.outputs if output.is_sent}
        unread = {model_input.value for model_input in graph.inputs if graph.values[model_input.value].requires_grad}
        hands_on = False
        for position, op in enumerate(self.ops):
            if hands_on and not unread.isdisjoint(op.inputs):
                yield position
                hands_on = False
            unread.difference_update(op.inputs)
            hands_on |= not sent.isdisjoint(op.outputs)

    def _gradients_sent(self) -> tuple[list[dict[str, str]], list[list[str]]]:
        """Return, by chunk, the gradients that it receives before its backward, and those that it sends afterwards."""
        graph = self.regions.graph
        arriving: list[dict[str, str]] = [{} for _ in range(len(self.chunks) + 1)]
        leaving: list[list[str]] = [[] for _ in arriving]
        producer_position = {name: position for position, op in enumerate(self.ops) for name in op.outputs}
        for output in graph.outputs:
            if output.is_sent and graph.values[output.value].requires_grad:
                name = self.root(output.value)
                arriving[bisect_right(self.chunks, producer_position[output.value])][name] = name
        for position, op in enumerate(self.ops if self.chunks else ()):
            for name in (n for n in op.inputs if graph.values[n].kind == "input" and graph.values[n].requires_grad):
                leaving[bisect_right(self.chunks, position)].append(self.root(name))
        return arriving, leaving

    def _follow_gradients(self) -> None:
        """Fill ``gradients`` and ``aliased_gradients``, from the last op to the first."""
        values = self.regions.graph.values
        arriving, leaving = self._gradients_sent()
        gradient_owners = arriving.pop()
        for position in range(len(self.ops) - 1, -1, -1):
            if position + 1 in self.chunks:
                for name in leaving.pop():
                    gradient_owners.pop(name, None)
                gradient_owners |= arriving.pop()
            op = self.ops[position]
            self.gradients[position] = tuple(dict.fromkeys(gradient_owners.values()))
            self.aliased_gradients[position] = frozenset(
                name for name, owner in gradient_owners.items() if name != owner
            )
            if not self.has_backward(op):
                continue
            outputs = {self.root(name) for name in op.outputs}
            arrived = next((gradient_owners[name] for name in outputs if name in gradient_owners), None)
            new_gradients = set(self.new_gradients(op))
            sources = {self.root(n) for n in op.inputs if values[n].requires_grad and values[n].kind != "parameter"}
            for name in outputs - sources:
                gradient_owners.pop(name, None)
            for name in sources:
                gradient_owners[name] = (
                    name if name in new_gradients or name in gradient_owners or arrived is None else arrived
                )
