"""Pieces of Python text from which `torch_script` assembles a script: imports, expressions, functions."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 120

_SOURCES = {
    "collections.abc": ("Iterator",),
    "contextlib": ("nullcontext",),
    "functools": ("partial",),
    "typing": ("Any",),
    "torch": ("nn",),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": (
        "apply_activation_checkpointing",
        "checkpoint_wrapper",
    ),
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.fsdp": ("MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.tensor": ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor.experimental": ("implicit_replication",),
    "torch.distributed.tensor.parallel": (
        *("ColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleOutput", "RowwiseParallel"),
        *("loss_parallel", "parallelize_module"),
    ),
    "torch.nn.attention": ("SDPBackend", "sdpa_kernel"),
    "torch.nn.functional": (),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "transformers.cache_utils": ("Cache", "DynamicLayer"),
    "torch.utils.checkpoint": ("CheckpointPolicy", "create_selective_checkpoint_contexts"),
}
"""Module -> names that a script may import from it."""


def imports(text: str, model_classes: Iterable[str]) -> str:
    """Return the import statements of what ``text`` uses."""
    code = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)
    used = set(re.findall(r"\w+", code))
    standard, others = ["import os"] if "os." in text else [], ["import torch", "import torch.distributed as dist"]
    if re.search(r"\bF\.", text):
        others.append("import torch.nn.functional as F")
    sources = {**_SOURCES, "transformers": tuple(sorted(model_classes))}
    for source, names in sorted(sources.items()):
        imported = ", ".join(name for name in names if name in used)
        if imported:
            place = (
                standard if source.partition(".")[0] in ("collections", "contextlib", "functools", "typing") else others
            )
            place.append(_import(source, imported))
    return "\n\n".join("\n".join(lines) for lines in (standard, others) if lines)


def _import(source: str, names: str) -> str:
    line = f"from {source} import {names}"
    if len(line) <= WIDTH:
        return line
    inside = "".join(f"    {name},\n" for name in names.split(", "))
    return f"from {source} import (\n{inside})"


def expression(pattern: str, root: str = "model") -> str:
    """Return Python code for the iterable of modules that an FQN pattern matches: "model.layers" for "layers.*"."""
    loops: list[str] = []
    text, parts = root, pattern.split(".") if pattern else []
    for position, part in enumerate(parts):
        span = re.fullmatch(r"\{(\d+)-(\d+)\}", part)
        if part == "*" or span:
            text += f"[{int(span[1])}:{int(span[2]) + 1}]" if span else ""
            if position == len(parts) - 1 and not loops:
                return text
            name = f"block{len(loops) or ''}"
            loops.append(f"for {name} in {text}")
            text = name
        else:
            text += f"[{part}]" if part.isdigit() else f".{part}"
    return f"[{text} {' '.join(loops)}]" if loops else f"[{text}]"


def joined(expressions: Sequence[str]) -> str:
    """Return Python code for the modules of several expressions; "" for none."""
    if len(expressions) < 2:
        return "".join(expressions)
    parts = [text[1:-1] if text.startswith("[") and " for " not in text else f"*{text}" for text in expressions]
    return f"[{', '.join(parts)}]"


def literal(value: Any) -> str:
    """Return a value of JSON as Python code, dicts with one entry a line at the outermost level."""
    if isinstance(value, Mapping):
        return mapping({key: _inline(item) for key, item in value.items()})
    return _inline(value)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(key))}: {_inline(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def mapping(entries: Mapping[str, str]) -> str:
    """Return a dict display with one entry a line; values are code."""
    return "{\n" + "".join(f'    "{key}": {value},\n' for key, value in entries.items()) + "}" if entries else "{}"


def wrapped(text: str) -> str:
    """Return code with the last brackets of each line that is too long spread over lines, one element each."""
    return "\n".join(line for given in text.split("\n") for line in _wrapped_line(given))


def _wrapped_line(line: str) -> list[str]:
    code = line.rstrip(",:")
    if len(line) <= WIDTH or not code or code[-1] not in ")]}" or line.lstrip().startswith("#"):
        return [line]
    opening, commas, depth = len(code) - 1, [], 0
    for index in range(len(code) - 1, -1, -1):
        depth += (code[index] in ")]}") - (code[index] in "([{")
        if code[index] == "," and depth == 1:
            commas.append(index)
        if depth == 0:
            opening = index
            break
    indent = " " * (len(line) - len(line.lstrip()))
    cuts = [opening, *reversed(commas), len(code) - 1]
    elements = [code[start + 1 : end].strip() for start, end in itertools.pairwise(cuts)]
    inside = [f"{indent}    {element}," for element in elements if element]
    return [
        code[: opening + 1],
        *(part for given in inside for part in _wrapped_line(given)),
        indent + line[len(code) - 1 :],
    ]


def function(signature: str, doc: str, *body: str) -> str:
    """Return a function with a docstring; pieces of the body may have several lines."""
    lines = "\n".join(piece.rstrip() for piece in body if piece)
    return f'def {signature}:\n    """{doc}"""\n{textwrap.indent(lines, "    ")}'


def loop(modules: str, *body: str, name: str = "module") -> str:
    """Return a loop over modules; one that has a single element becomes its body."""
    single = re.fullmatch(r"\[([^\[\]]+(?:\[\d+\][^\[\]]*)*)\]", modules)
    if single and " for " not in modules:
        return "\n".join(re.sub(rf"\b{name}\b", single[1], line) for line in body)
    return f"for {name} in {modules}:\n" + "\n".join(f"    {line}" for line in body)
