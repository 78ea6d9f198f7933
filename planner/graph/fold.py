"""Repeated blocks of a model, of which only three are traced.

The model runs once on meta tensors, while the ops and tensors of every block in a ``ModuleList`` are recorded.
Consecutive blocks are repeated if they run equal ops on corresponding tensors: tensors from outside the blocks, or
tensors from the preceding block. The first three repeated blocks are traced and stand for the rest. As a check, the
model runs a second time without the other blocks: every recorded op must be the same as in the first run, inside the
blocks and outside. `planner.graph.unroll` adds the other blocks to the traced graph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.counting.activation_costs import activation_costs
from planner.graph.capture import ExampleInputs
from planner.graph.meta_ops import argument_key, returns_one_new_tensor
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.model_rewrites.experts.modules import experts_as_one_op
from planner.model_rewrites.mla import mla_keys_concatenated
from planner.model_rewrites.tree_paths import path_text

TRACED_BLOCKS = 3
"""Repeated blocks that are traced. The first reads tensors from outside the blocks, and the second reads tensors of the
first. Every further block reads the same tensors as the third, or corresponding tensors of its preceding block."""

_FEWEST_BLOCKS = TRACED_BLOCKS + 2
"""Fewest repeated blocks that are folded; fewer are all traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlocks:
    """Consecutive equal blocks.

    Attributes:
        container: FQN of the ``ModuleList``.
        first: index of the first block.
        length: number of blocks.
    """

    container: str
    first: int
    length: int


def find_repeated_blocks(module: nn.Module, inputs: ExampleInputs) -> tuple[RepeatedBlocks, ...]:
    """Return the repeated blocks of ``module``; () if any op of the shortened model would differ."""
    lists = _block_lists(module)
    if not lists:
        return ()
    try:
        whole = _record(module, inputs, lists)
        repeats = tuple(repeat for container in lists for repeat in _repeats_in(container, whole))
        if not repeats:
            return ()
        with without_repeated_blocks(module, repeats):
            short = _record(module, inputs, lists)
    except Exception:  # noqa: BLE001  the full trace, which follows, reports what forward raises
        return ()
    return repeats if _are_equal(whole, short, repeats) else ()


@contextmanager
def without_repeated_blocks(module: nn.Module, repeats: Sequence[RepeatedBlocks]) -> Iterator[None]:
    """Within this context, ``module`` has only the first `TRACED_BLOCKS` blocks of each of ``repeats``."""
    with ExitStack() as stack:
        for container in dict.fromkeys(repeat.container for repeat in repeats):
            blocks = module.get_submodule(container)._modules
            stack.callback(_restore, blocks, dict(blocks))
            remaining = [blocks[str(index)] for index in _traced_indices(len(blocks), repeats, container)]
            blocks.clear()
            blocks.update({str(index): block for index, block in enumerate(remaining)})
        yield


def _restore(blocks: dict[str, nn.Module | None], original: Mapping[str, nn.Module | None]) -> None:
    blocks.clear()
    blocks.update(original)


def _traced_indices(length: int, repeats: Sequence[RepeatedBlocks], container: str) -> list[int]:
    """Return the indices of the blocks that remain in the shortened model, of a list of ``length`` blocks."""
    removed = {
        index
        for repeat in repeats
        if repeat.container == container
        for index in range(repeat.first + TRACED_BLOCKS, repeat.first + repeat.length)
    }
    return [index for index in range(length) if index not in removed]


def _block_lists(module: nn.Module) -> list[str]:
    """Return the FQNs of module lists with at least `_FEWEST_BLOCKS` blocks that are not inside a block of another."""
    lists: list[str] = []
    for name, submodule in module.named_modules():
        inside = any(re.match(re.escape(outer) + r"\.\d+(\.|$)" if outer else r"\d+(\.|$)", name) for outer in lists)
        names = list(submodule._modules)
        if not inside and len(names) >= _FEWEST_BLOCKS and names == [str(index) for index in range(len(names))]:
            lists.append(name)
    return lists


# --- recording of a forward ----------------------------------------------------------------------------------------

_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})

Block = tuple[str, int]
"""FQN of a module list, and the index of a block in it."""


@dataclass(slots=True)
class _BlockRecord:
    """Record of one block in a forward.

    Attributes:
        events: the non-tensor arguments, every op, and the block's results. Tensors have their names in the block.
        arguments: path of an argument -> name of the tensor in the model.
        calls: how often the block is called.
    """

    events: list[Hashable] = field(default_factory=list)
    arguments: dict[str, Hashable] = field(default_factory=dict)
    calls: int = 0


@dataclass(slots=True)
class _Recording:
    """Record of a model's forward: of each block, and of the ops outside of blocks."""

    blocks: dict[Block, _BlockRecord] = field(default_factory=dict)
    outside: list[Hashable] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    """Records every op of a forward, with names of its tensors.

    A tensor's name in the model identifies it as an input, a parameter, a buffer, or the n-th result of a block (or of
    the code outside of blocks). Its name in a block identifies it as an argument, a parameter, a buffer or the n-th
    result of that block. A tensor that is none of these in the block is recorded under its name in the model.
    """

    def __init__(self, module: nn.Module, inputs: ExampleInputs, lists: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = _Recording()
        self._names: dict[int, Hashable] = {}
        self._named: list[torch.Tensor] = []
        self._result_counts: dict[Block | None, int] = {}
        self._current: Block | None = None
        self._names_in_block: dict[int, Hashable] = {}
        self._results: dict[Hashable, torch.Tensor] = {}
        self._blocks = {
            block: (name, int(index))
            for name in lists
            for index, block in module.get_submodule(name)._modules.items()
            if block is not None
        }
        for path, leaf in pytree.tree_leaves_with_path((inputs.args, dict(inputs.kwargs))):
            if isinstance(leaf, torch.Tensor):
                self._set_name(leaf, ("input", path_text(path)))
        for state, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._set_name(tensor, ("state", state, tensor.requires_grad))

    def _set_name(self, tensor: torch.Tensor, name: Hashable) -> None:
        self._names[id(tensor)] = name
        self._named.append(tensor)  # keeps it alive, so that no other tensor gets its id

    def _name(self, tensor: torch.Tensor) -> Hashable:
        """Return the tensor's name in the model; a new tensor becomes the next result of the current block."""
        if id(tensor) not in self._names:
            number = self._result_counts.get(self._current, 0)
            self._result_counts[self._current] = number + 1
            self._set_name(tensor, ("result", self._current, number))
            if self._current is not None:
                self._names_in_block[id(tensor)] = ("result", number)
        return self._names[id(tensor)]

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self._blocks:
                stack.callback(block.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        block = self._blocks[module]
        record = self.recording.blocks.setdefault(block, _BlockRecord())
        record.calls += 1
        self._current, self._names_in_block = block, {}
        prefix = f"{block[0]}.{block[1]}." if block[0] else f"{block[1]}."
        for state, tensor in (*module.named_parameters(), *module.named_buffers()):
            name = self._names.get(id(tensor), ())
            if name == ("state", prefix + state, tensor.requires_grad):
                self._names_in_block[id(tensor)] = ("state of the block", state, tensor.requires_grad)
        for path, leaf in pytree.tree_leaves_with_path((args, kwargs)):
            text = path_text(path)
            if isinstance(leaf, torch.Tensor):
                record.arguments[text] = self._name(leaf)
                self._names_in_block.setdefault(id(leaf), ("argument", text))
            else:
                record.events.append(("argument", text, repr(leaf)))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.recording.blocks[self._blocks[module]].events.append(("returns", self._described(output)))
        self._current, self._names_in_block = None, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        event = (func, self._described(args), self._described(kwargs))
        out = self._run(func, args, kwargs)
        current = self._current
        results: list[Hashable] = []
        for leaf in (out,) if isinstance(out, torch.Tensor) else pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._name(leaf)
                results.append((tuple(leaf.shape), leaf.dtype))
            else:
                results.append(repr(leaf))
        events = self.recording.outside if current is None else self.recording.blocks[current].events
        events.append((event, tuple(results)))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an op; of equal ops that return one new meta tensor, only the first runs."""
        if not returns_one_new_tensor(func):
            return func(*args, **kwargs)
        key = (func, argument_key(args), argument_key(kwargs))
        equal = self._results.get(key)
        if equal is not None:
            return torch.empty_strided(equal.shape, equal.stride(), dtype=equal.dtype, device=equal.device)
        out = func(*args, **kwargs)
        if type(out) is torch.Tensor and out.is_meta and out.storage_offset() == 0:
            self._results[key] = out
        return out

    def _described(self, tree: Any) -> Hashable:
        """Return arguments or results as a comparable value: tensors by name in the block, shape and dtype."""
        if isinstance(tree, torch.Tensor):
            name = self._name(tree)
            return self._names_in_block.get(id(tree), name), tuple(tree.shape), tree.dtype
        kind = type(tree)
        if kind in _SCALARS:
            return repr(tree)
        if kind is tuple or kind is list:
            return kind.__name__, tuple([self._described(part) for part in tree])
        if kind is dict:
            return "dict", tuple([(key, self._described(part)) for key, part in tree.items()])
        leaves, spec = pytree.tree_flatten(tree)
        if spec.is_leaf():
            return repr(tree)
        return str(spec), tuple([self._described(leaf) for leaf in leaves])


def _record(module: nn.Module, inputs: ExampleInputs, lists: Sequence[str]) -> _Recording:
    recorder = _Recorder(module, inputs, lists)
    # Inference mode: hooks and modules then see the very objects that ops return, which the recorder tells apart by id.
    with (
        torch.inference_mode(),
        unpacked_sequences(),
        experts_as_one_op(module, activation_costs),
        mla_keys_concatenated(module),
        recorder.attached(),
        recorder,
    ):
        module(*inputs.args, **inputs.kwargs)
    return recorder.recording


# --- repeated blocks of a recording --------------------------------------------------------------------------------


def _repeats_in(container: str, recording: _Recording) -> Iterator[RepeatedBlocks]:
    indices = sorted(index for name, index in recording.blocks if name == container)
    first = 0
    for index in indices:
        if index == first:
            continue
        if index - 1 in indices and _continues(container, recording, first, index):
            continue
        if index - first >= _FEWEST_BLOCKS:
            yield RepeatedBlocks(container=container, first=first, length=index - first)
        first = index
    if indices and indices[-1] + 1 - first >= _FEWEST_BLOCKS:
        yield RepeatedBlocks(container=container, first=first, length=indices[-1] + 1 - first)


def _continues(container: str, recording: _Recording, first: int, index: int) -> bool:
    """Return whether block ``index`` repeats the preceding block; ``first`` is the first block of the run."""
    before, block = recording.blocks[container, index - 1], recording.blocks[container, index]
    if block.events != before.events or block.calls != 1 or before.calls != 1:
        return False
    if index - first < TRACED_BLOCKS - 1:
        return block.arguments.keys() == before.arguments.keys()
    return all(
        name == name_before or _relative(container, name, index) == _relative(container, name_before, index - 1)
        for name, name_before in ((name, before.arguments[path]) for path, name in block.arguments.items())
    )


def _relative(container: str, name: Any, index: int) -> Hashable:
    """Return a tensor's name relative to block ``index``: a block's result is named by its distance in blocks."""
    if name[0] == "result" and name[1] is not None and name[1][0] == container:
        return "result", index - name[1][1], name[2]
    return name, index  # unequal for any two blocks


# --- comparison of the whole and the shortened model ----------------------------------------------------------------


def _are_equal(whole: _Recording, short: _Recording, repeats: Sequence[RepeatedBlocks]) -> bool:
    """Return whether the shortened model runs the same ops as the whole, in the remaining blocks and outside."""
    lengths = Counter(container for container, _ in whole.blocks)
    originals = {
        (container, short_index): (container, index)
        for container, length in lengths.items()
        for short_index, index in enumerate(_traced_indices(length, repeats, container))
    }
    if set(short.blocks) != set(originals):
        return False
    indices = {block: original[1] for block, original in originals.items()}

    def in_whole(item: Any, repeat: RepeatedBlocks | None) -> Any:
        """Return an item of the short recording with the whole model's names; ``repeat``: the run that has the item."""
        return _renamed(
            item,
            lambda block: _last_block_for(originals[block], [other for other in repeats if other != repeat]),
            lambda name: fqn_in_whole(name, indices),
        )

    if in_whole(short.outside, None) != whole.outside:
        return False
    for block, original in originals.items():
        short_block, whole_block = short.blocks[block], whole.blocks[original]
        repeat = _repeat_of(original, repeats)
        if (
            in_whole(short_block.events, repeat) != whole_block.events
            or in_whole(short_block.arguments, repeat) != whole_block.arguments
        ):
            return False
        if short_block.calls != whole_block.calls:
            return False
    return True


def _repeat_of(block: Block, repeats: Sequence[RepeatedBlocks]) -> RepeatedBlocks | None:
    container, index = block
    return next((r for r in repeats if r.container == container and r.first <= index < r.first + r.length), None)


def _last_block_for(block: Block, repeats: Sequence[RepeatedBlocks]) -> Block:
    """Return the whole model's block that code after ``repeats`` reads in place of the short model's ``block``."""
    for repeat in repeats:
        if block == (repeat.container, repeat.first + TRACED_BLOCKS - 1):
            return repeat.container, repeat.first + repeat.length - 1
    return block


def fqn_in_whole(fqn: str, indices: Mapping[Block, int]) -> str:
    """Return the whole model's FQN for the short model's ``fqn``; ``indices``: block -> index in the whole model."""
    for container in {name for name, _ in indices}:
        match = re.match(re.escape(container + "." if container else "") + r"(\d+)(?=\.|$)", fqn)
        if match:
            index = indices[container, int(match[1])]
            return f"{fqn[: match.start(1)]}{index}{fqn[match.end(1) :]}"
    return fqn


def _renamed(item: Any, block: Callable[[Block], Block], state: Callable[[str], str]) -> Any:
    """Return a recorded item with the blocks and FQNs in tensor names replaced."""
    if isinstance(item, tuple):
        if len(item) == 3 and item[0] == "result" and isinstance(item[1], tuple):
            return "result", block(item[1]), item[2]
        if len(item) == 3 and item[0] == "state":
            return "state", state(item[1]), item[2]
        return tuple(_renamed(part, block, state) for part in item)
    if isinstance(item, list):
        return [_renamed(part, block, state) for part in item]
    if isinstance(item, dict):
        return {key: _renamed(part, block, state) for key, part in item.items()}
    return item
