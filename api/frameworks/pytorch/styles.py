"""`TensorStyles`: the layouts of a plan on its axis of tensor parallelism as styles of ``parallelize_module``.

Tensors between styled modules stay DTensors (``use_local_output=False``), so that every module boundary can have the
layouts of the plan's ports. One redistribution of a tensor that several modules read, such as the input of the query,
key and value projections, belongs to a module around them or to the module that returns the tensor: `observed_calls`
tells which.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.conv import _ConvNd

from api.frameworks.expressed import Row
from api.frameworks.pytorch.axes import ParameterLayouts
from api.frameworks.pytorch.calls import Calls
from api.frameworks.pytorch.names import collapsed, names_of, tied_parameters
from planner.plan.ports import Port, ports_of, resolve_input_ports, resolve_output_ports
from planner.plan.sharding_plan import ShardingPlan

R = Replicate()
_CONV1D = "Conv1D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One redistribution: a tensor at the boundary of a module, and its placements before and after it.

    With equal placements only the gradient is redistributed, to the placement of the tensor.
    """

    fqn: str
    name: str
    source: Placement
    layout: Placement

    @property
    def is_of_gradient(self) -> bool:
        """Whether only the gradient is redistributed."""
        return self.source == self.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStyles:
    """Styles by FQN pattern, each as the text of a Python expression.

    Attributes:
        weights: styles that distribute parameters.
        inputs, outputs: styles that redistribute arguments and results.
        gradients: styles that redistribute the gradient of an argument or a result.
        ties: (parameter, parameter that it is tied to), which styles of their modules untie.
        is_vocabulary_sharded: whether the logits are sharded over the vocabulary.
        needs_shard_parameters: whether ``weights`` has the style ``ShardParameters``.
        batch: model input -> its placement, where it is not replicated.
        rows: what is said of parameters and activations on the axis.
    """

    weights: Mapping[str, str]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    gradients: Mapping[str, str]
    ties: tuple[tuple[str, str], ...]
    is_vocabulary_sharded: bool
    batch: Mapping[str, Placement]
    rows: tuple[Row, ...]

    @property
    def needs_shard_parameters(self) -> bool:
        """Whether a module is neither linear nor an embedding in torch's terms."""
        return any(text.startswith("ShardParameters") for text in self.weights.values())


def unsaid_parameters(module: nn.Module, layouts: Mapping[str, ParameterLayouts], axis: int) -> tuple[str, ...]:
    """Return the parameters whose compute layout on ``axis`` no style of torch, nor ``ShardParameters``, gives.

    Those of convolutions are among them: torch's DTensor has no backward of a convolution of replicated tensors.
    """
    unsaid = [
        name
        for name, item in layouts.items()
        if item.compute[axis] != R
        and not (type(item.compute[axis]) is Shard and _kind(module, name.rpartition(".")[0]) is not None)
    ]
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in layouts}
    return (*unsaid, *(name for name, owner in owners.items() if isinstance(owner, _ConvNd)))


def _kind(module: nn.Module, fqn: str) -> str | None:
    part = module.get_submodule(fqn)
    if isinstance(part, nn.Linear | nn.Embedding):
        return "linear" if isinstance(part, nn.Linear) else "embedding"
    return "conv1d" if type(part).__name__ == _CONV1D else None


def tensor_styles(
    plan: ShardingPlan, module: nn.Module, layouts: Mapping[str, ParameterLayouts], axis: int, calls: Calls
) -> TensorStyles:
    """Return the styles for the layouts of ``plan`` on its mesh axis ``axis``.

    Args:
        plan: the plan.
        module: the model, on any device.
        layouts: layouts of its parameters.
        axis: index of the axis of tensor parallelism.
        calls: calls of the model's modules; empty where they are not known.
    """
    return _Styles(plan, module, layouts, axis, calls).written()


@dataclass(slots=True)
class _Linear:
    """What the style of one linear layer or embedding says beside the placement of its weight."""

    shard: Shard
    input: Placement | None = None
    output: Placement | None = None


@dataclass(slots=True)
class _Styles:
    plan: ShardingPlan
    module: nn.Module
    layouts: Mapping[str, ParameterLayouts]
    axis: int
    calls: Calls
    linears: dict[str, _Linear] = field(default_factory=dict)
    conv1ds: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, dict[str, Move]] = field(default_factory=lambda: defaultdict(dict))
    outputs: dict[str, dict[str, Move]] = field(default_factory=lambda: defaultdict(dict))
    gradients: dict[str, str] = field(default_factory=dict)
    attention: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)

    def written(self) -> TensorStyles:
        ties = tied_parameters(self.module)
        untied = dict(self._one_layout(ties))
        self._place_weights(untied)
        self._move_outputs()
        self._move_inputs()
        modules = [name for name, _ in self.module.named_modules()]
        return TensorStyles(
            weights=collapsed({**self._linear_texts(), **self.conv1ds}, modules),
            inputs=collapsed({fqn: self._input_text(fqn, moves) for fqn, moves in self.inputs.items()}, modules),
            outputs=collapsed({fqn: self._output_text(fqn, moves) for fqn, moves in self.outputs.items()}, modules),
            gradients=collapsed(self.gradients, modules),
            ties=ties,
            is_vocabulary_sharded=self._is_vocabulary_sharded(),
            batch=self._batch(),
            rows=(*self._parameter_rows(ties, untied), *self._activation_rows(modules)),
        )

    def _one_layout(self, ties: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Placement]]:
        """Yield (parameter, placement) of tied parameters with two layouts: they get that of the linear layer."""
        for pair in ties:
            placements = {name: self.layouts[name].compute[self.axis] for name in pair if name in self.layouts}
            linear = [name for name in placements if _kind(self.module, name.rpartition(".")[0]) == "linear"]
            if len(set(placements.values())) > 1:
                yield from ((name, placements[(linear or list(pair))[0]]) for name in pair)

    def _placement(self, name: str, untied: Mapping[str, Placement]) -> Placement:
        return untied.get(name, self.layouts[name].compute[self.axis])

    def _place_weights(self, untied: Mapping[str, Placement]) -> None:
        shards: dict[str, dict[str, Shard]] = defaultdict(dict)
        for name in self.layouts:
            placement = self._placement(name, untied)
            if isinstance(placement, Shard):
                fqn, _, leaf = name.rpartition(".")
                shards[fqn][leaf] = placement
        for fqn, of_module in shards.items():
            if _kind(self.module, fqn) == "conv1d":
                arguments = ", ".join(f"{leaf}={shard_text(shard)}" for leaf, shard in sorted(of_module.items()))
                self.conv1ds[fqn] = f"ShardParameters({arguments})"
            elif "weight" in of_module:
                self.linears[fqn] = _Linear(of_module["weight"])

    def _moves(self, side: str) -> Iterable[Move]:
        modules = [name for name, _ in self.module.named_modules()]
        entries = (
            resolve_input_ports(self.plan.input_plan, modules)
            if side == "input"
            else resolve_output_ports(self.plan.output_plan, modules)
        )
        for fqn, spec in entries.items():
            for name, port in ports_of(spec) if fqn or side == "output" else ():
                layout = port.layout[self.axis]
                source = _unlike(layout) if port.source is None else port.source[self.axis]
                if source == layout and not _changes_gradient(port, self.axis):
                    continue
                if _is_within_attention(side, source, layout):
                    self.attention.add(fqn)
                    continue
                yield Move(fqn=fqn, name=name or ("0" if side == "input" else ""), source=source, layout=layout)

    def _move_outputs(self) -> None:
        """Put each redistribution of a result on the innermost module that returns the tensor."""
        for move in self._moves("output"):
            call = self.calls.by_module.get(move.fqn)
            tensor = None if call is None else call.results.get(move.name)
            fqn = None if tensor is None else self.calls.producer(tensor)
            linear = self.linears.get(move.fqn if fqn is None else fqn)
            if move.is_of_gradient:
                self._pin_gradient(fqn or move.fqn, None)
            elif linear is not None and linear.output is None:
                linear.output = move.layout
            elif fqn is not None:
                self.outputs[fqn][""] = move
            elif move.name == "" or (call is not None and call.tuple_length is not None):
                self.outputs[move.fqn][move.name] = move
            else:
                self.lost.add(move.fqn)

    def _move_inputs(self) -> None:
        """Put each redistribution of an argument on its module, or on one module for all that read the tensor."""
        shared: dict[tuple[int, Placement, bool], list[Move]] = defaultdict(list)
        for move in self._moves("input"):
            call = self.calls.by_module.get(move.fqn)
            tensor = None if call is None else call.arguments.get(move.name)
            key = (id(move) if tensor is None else id(tensor), move.layout, move.is_of_gradient)
            shared[key].append(move)
        for moves in shared.values():
            if len(moves) == 1:
                self._move_input(moves[0])
            elif not self._move_shared(moves):
                self.repeated.update(move.fqn for move in moves)
                for move in moves:
                    self._move_input(move)

    def _move_input(self, move: Move) -> None:
        linear = self.linears.get(move.fqn)
        if move.is_of_gradient:
            self._pin_gradient(move.fqn, move.name)
            return
        if linear is not None and move.layout == _desired_input(self.module, move.fqn, linear):
            linear.input = move.source
            return
        call = self.calls.by_module.get(move.fqn)
        producer = None if call is None else self.calls.producer(call.arguments[move.name])
        made = None if producer is None else self.linears.get(producer)
        if made is not None and made.output is None and move.source.is_partial():
            made.output = move.layout
        else:
            self.inputs[move.fqn][move.name] = move

    def _move_shared(self, moves: list[Move]) -> bool:
        """Return whether one module redistributes a tensor for all of the modules that read it."""
        first = moves[0]
        tensor = self.calls.by_module[first.fqn].arguments[first.name]
        readers = list(self.calls.receivers(tensor))
        fqns = [move.fqn for move in moves]
        around = [(fqn, name) for fqn, name in readers if all(reader.startswith(f"{fqn}.") for reader in fqns) and fqn]
        for fqn, name in sorted(around, key=lambda item: -item[0].count(".")):
            inside = [reader for reader, _ in readers if reader.startswith(f"{fqn}.")]
            if all(reader in fqns for reader in inside):
                if first.is_of_gradient:
                    self._pin_gradient(fqn, name)
                else:
                    self.inputs[fqn][name] = first
                return True
        producer = self.calls.producer(tensor)
        if producer is not None and all(reader in fqns for reader, _ in readers):
            if first.is_of_gradient:
                self._pin_gradient(producer, None)
            else:
                self.outputs[producer][""] = first
            return True
        return False

    def _pin_gradient(self, fqn: str, argument: str | None) -> None:
        key = argument if argument is None or not argument.isdigit() else int(argument)
        self.gradients[fqn] = f"PinGradient({'' if key is None else json.dumps(key)})"

    def _linear_texts(self) -> dict[str, str]:
        return {fqn: _linear_text(self.module, fqn, linear) for fqn, linear in self.linears.items()}

    def _input_text(self, fqn: str, moves: Mapping[str, Move]) -> str:
        positions = {int(name): move for name, move in moves.items() if name.isdigit()}
        call = self.calls.by_module.get(fqn)
        count = max([*(index + 1 for index in positions), 0 if call is None or not positions else call.positional])
        parts: list[str] = []
        if positions:
            parts += _layout_tuples("input_layouts", "desired_input_layouts", positions, count)
        keywords = {name: move for name, move in moves.items() if not name.isdigit()}
        if keywords:
            sources = ", ".join(f'"{name}": {shard_text(move.source)}' for name, move in keywords.items())
            layouts = ", ".join(f'"{name}": {shard_text(move.layout)}' for name, move in keywords.items())
            parts += [f"input_kwarg_layouts={{{sources}}}", f"desired_input_kwarg_layouts={{{layouts}}}"]
        return f"PrepareModuleInput({', '.join(parts)})"

    def _output_text(self, fqn: str, moves: Mapping[str, Move]) -> str:
        call = self.calls.by_module.get(fqn)
        positions = {int(name or 0): move for name, move in moves.items()}
        count = 1 if call is None or call.tuple_length is None else call.tuple_length
        parts = _layout_tuples("output_layouts", "desired_output_layouts", positions, count)
        return f"PrepareModuleOutput({', '.join(parts)}, use_local_output=False)"

    def _is_vocabulary_sharded(self) -> bool:
        root = self.calls.by_module.get("")
        logits = None if root is None else root.results.get("logits", root.results.get(""))
        producer = None if logits is None else self.calls.producer(logits)
        linear = None if producer is None else self.linears.get(producer)
        return linear is not None and linear.shard.dim == 0 and linear.output is None and producer not in self.outputs

    def _batch(self) -> dict[str, Placement]:
        spec = self.plan.input_plan.get("input", self.plan.input_plan.get(""))
        ports = {} if spec is None else dict(ports_of(spec))
        layouts = {name: port.layout[self.axis] for name, port in ports.items() if name != "labels"}
        return {name: layout for name, layout in layouts.items() if layout != R}

    def _parameter_rows(self, ties: Iterable[tuple[str, str]], untied: Mapping[str, Placement]) -> Iterable[Row]:
        names = list(self.layouts)
        whole = {n for n, item in self.layouts.items() if item.stored[self.axis] != item.compute[self.axis]} - {*untied}
        axis = self.plan.layout_mesh.names[self.axis]
        if whole:
            text = f"stored as they are used on {axis}, where the plan has another layout: {names_of(whole, names)}"
            yield Row(field="parameters", outcome="approximated", detail=text)
        if untied:
            text = f"tied parameters have one layout on {axis}, that of the linear layer: {', '.join(sorted(untied))}"
            yield Row(field="parameters", outcome="approximated", detail=text)
        partial = [n for n, item in self.layouts.items() if item.gradient and item.gradient[self.axis].is_partial()]
        if partial and self.plan.job.training:
            text = f"gradients of {names_of(partial, names)} are all-reduced over {axis} before FSDP scatters them"
            yield Row(field="gradient reduction", outcome="approximated", detail=f"{text}: the plan scatters first")

    def _activation_rows(self, modules: list[str]) -> Iterable[Row]:
        axis = self.plan.layout_mesh.names[self.axis]
        yield Row(field="activations", outcome="expressed", detail=f"DTensors on {axis} between modules")
        if self.attention:
            text = f"attention is sharded over heads, not over the sequence: {names_of(self.attention, modules)}"
            yield Row(field="activations", outcome="approximated", detail=text)
        if self.repeated:
            text = f"each of these redistributes the same tensor: {names_of(self.repeated, modules)}"
            yield Row(field="activations", outcome="approximated", detail=text)
        if self.lost:
            text = f"results that are no tensor or tuple keep their layout: {names_of(self.lost, modules)}"
            yield Row(field="activations", outcome="lost", detail=text)


def _is_within_attention(side: str, source: Placement, layout: Placement) -> bool:
    """Return whether a redistribution turns sharded heads into a sharded sequence before attention, or back after."""
    pair = (source, layout) if side == "output" else (layout, source)
    return pair == (Shard(2), Shard(1))


def _changes_gradient(port: Port, axis: int) -> bool:
    return port.grad is not None and port.source_grad is not None and port.grad[axis] != port.source_grad[axis]


def _unlike(layout: Placement) -> Placement:
    """Return another placement than ``layout``: a style redistributes a DTensor only if its two layouts differ."""
    return Shard(0) if layout == R else R


def _desired_input(module: nn.Module, fqn: str, linear: _Linear) -> Placement:
    is_rowwise = isinstance(module.get_submodule(fqn), nn.Linear) and linear.shard.dim == 1
    return Shard(2) if is_rowwise else R


def _linear_text(module: nn.Module, fqn: str, linear: _Linear) -> str:
    is_embedding = isinstance(module.get_submodule(fqn), nn.Embedding)
    is_colwise = (linear.shard.dim == 0) != is_embedding
    output = linear.output if linear.output is not None or is_colwise else Shard(2) if is_embedding else Partial()
    parts = [] if linear.input is None else [f"input_layouts={shard_text(linear.input)}"]
    if is_embedding and not is_colwise:
        parts = ["input_layouts=Replicate()"]
    parts += [] if output is None else [f"output_layouts={shard_text(output)}"]
    return f"{'Colwise' if is_colwise else 'Rowwise'}Parallel({', '.join([*parts, 'use_local_output=False'])})"


def _layout_tuples(before: str, after: str, positions: Mapping[int, Move], count: int) -> list[str]:
    def text(of: Callable[[Move], Placement]) -> str:
        items = [shard_text(of(positions[index])) if index in positions else "None" for index in range(count)]
        return items[0] if count == 1 else f"({', '.join(items)})"

    return [f"{before}={text(lambda move: move.source)}", f"{after}={text(lambda move: move.layout)}"]


def shard_text(placement: Placement) -> str:
    """Return a placement as Python code."""
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return "Replicate()" if placement == R else "Partial()"
