"""vLLM: the command line of ``vllm serve``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

from api.frameworks.configurations.documents import Notes, Section, check_sayable, closest, divisors, known_keys
from api.frameworks.configurations.flags import read_flags
from api.frameworks.launch import Framework, Launch, Reading, flag
from cost_model.configuration.implementation import Implementation, KernelOptions, StateOptions
from cost_model.configuration.parallelism import TrainingDtype

VERSION = "0.33.0"
TITLE = f"vLLM {VERSION}"

ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "--device-memory-utilization": "--gpu-memory-utilization",
}

DTYPES: Mapping[str, TrainingDtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "auto": "bf16",
}
"""``--dtype`` -> dtype of a launch. For writing, the first name of each holds."""

GONE = frozenset(("--swap-space", "--disable-log-requests", "--use-v2-block-manager", "--num-scheduler-steps"))
"""Flags that older releases had, which say nothing of parallelism."""

SIZES = ("tensor", "pipeline", "prefill-context", "data")
"""Degrees whose product is the number of devices: ``--NAME-parallel-size``."""

_NOT_PRICED = {
    "--quantization": "weights are priced unquantized",
    "--kv-cache-dtype": "keys and values are priced in the dtype of compute",
    "--speculative-config": "speculative decoding is not priced",
    "--enable-lora": "adapters are not priced",
    "--enable-dbo": "overlapped micro-batches are not priced",
    "--enable-eplb": "redundant experts are not priced",
    "--kv-offloading-size": "what is held on the host is not priced",
    "--cpu-offload-gb": "what is held on the host is not priced",
    "--kv-transfer-config": "prefill on other devices is not priced",
    "--decode-context-parallel-size": "keys and values are priced as copied over tensor ranks that share a head",
}
_UNIT = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")


def recognises(text: str) -> bool:
    """Return whether a text looks like the command of a vLLM server."""
    return re.search(r"\bvllm\s+serve\b|\bvllm\.entrypoints\b", text) is not None


def read(text: str, devices: int) -> Reading:
    """Return what the command line of a vLLM server says for a number of devices."""
    notes = Notes()
    section = Section(_flags(text, notes), notes)
    sizes = _sizes(section, devices)
    _check(section, sizes)
    for key, because in _NOT_PRICED.items():
        section.leave(key, because=because, unless=(False, 0, 1, "0", "1", "auto", "none"))
    version = re.search(r"^#.*\bvLLM (\d+\.\d+\.\d+)", text, re.MULTILINE)
    return notes.reading(
        _launch(section, sizes),
        version=version[1] if version else None,
    )


def _flags(text: str, notes: Notes) -> dict[str, object]:
    """Return flag -> value; of a flag that repeats, the last holds. Numbers are numbers, switches booleans."""
    known, values = known_keys("vllm"), dict[str, object]()
    for written, value in read_flags(text):
        if written.startswith("-O"):
            values["--optimization-level"] = _value(written[2:].lstrip("=") or value)
            continue
        key = written.split(".")[0]
        key = key if key in ALIASES or not key.startswith("--") else "--" + key[2:].replace("_", "-")
        key = ALIASES.get(key, key)
        if key not in known and key.startswith("--no-") and f"--{key[5:]}" in known:
            values[f"--{key[5:]}"] = False
        elif key not in known and key not in GONE:
            notes.faults.append(f"{written} is not a flag of {TITLE}{closest(key, known)}")
        elif "." in written:
            values.setdefault(key, written)
        else:
            values[key] = True if value is None else _value(value)
    return values


def _value(text: str | None) -> object:
    match = _NUMBER.fullmatch(text or "")
    if not match:
        return text
    number = float(match[1]) * _UNIT.get(match[2], 1)
    return int(number) if number.is_integer() and ("." not in match[1] or match[2]) else number


def _sizes(section: Section, devices: int) -> dict[str, int]:
    keys = {name: f"--{name}-parallel-size" for name in SIZES}
    sizes = {name: section.number(key, 1) for name, key in keys.items()}
    total = 1
    for size in sizes.values():
        total *= size
    if total != devices:
        said = " x ".join(f"{keys[name]} {size}" for name, size in sizes.items() if size > 1) or "one device"
        others = total // sizes["tensor"]
        advice = f"{keys['tensor']} {devices // others}" if devices % others == 0 else f"a product of {devices}"
        section.notes.faults.append(f"{said} is {total} of the cluster's {devices} devices: {advice} would do")
    return sizes


def _check(section: Section, sizes: Mapping[str, int]) -> None:
    """Note what vLLM refuses (``_validate_parallel_config`` in config/parallel.py, engine/arg_utils.py)."""
    faults = section.notes.faults
    tensor, prefill, data = sizes["tensor"], sizes["prefill-context"], sizes["data"]
    context = section.number("--decode-context-parallel-size", 1)
    legal = [size for size in range(1, tensor + 1) if tensor % size == 0]
    legal = legal if prefill == 1 else sorted({1, prefill, tensor * prefill})
    if context not in legal:
        advice = " or ".join(map(str, legal))
        faults.append(f"--decode-context-parallel-size {context} does not split the ranks of keys: {advice} would do")
    local = section.number("--data-parallel-size-local", 1, least=0)
    if local > data:
        faults.append(f"--data-parallel-size-local {local} is above --data-parallel-size {data}: {data} would do")
    balancers = [key for key in ("--data-parallel-external-lb", "--data-parallel-hybrid-lb") if key in section]
    if len(balancers) > 1:
        faults.append(f"{' and '.join(balancers)} are both given: one of them would do")
    elif balancers and data == 1:
        faults.append(f"{balancers[0]} needs --data-parallel-size of 2 or more")
    total = tensor * sizes["pipeline"] * prefill * data
    nodes = section.number("--nnodes", 1)
    if total % nodes:
        faults.append(f"--nnodes {nodes} does not divide {total} processes ({divisors(total)} would do)")
    balances = section.switch("--enable-eplb", False)
    if balances and not section.switch("--enable-expert-parallel", False):
        faults.append("--enable-eplb needs --enable-expert-parallel")
    if section.switch("--enable-elastic-ep", False) and (sizes["pipeline"] > 1 or not balances):
        faults.append("--enable-elastic-ep needs --enable-eplb and --pipeline-parallel-size 1")
    share = section.values.get("--gpu-memory-utilization", 0.92)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        faults.append(f"--gpu-memory-utilization {share} is not above 0 and at most 1: 0.92 is the default")
    _check_tokens(section)


def _check_tokens(section: Section) -> None:
    if "--max-num-batched-tokens" not in section:
        return
    tokens = section.number("--max-num-batched-tokens", 8192)
    sequences = section.number("--max-num-seqs", 1)
    if tokens < sequences:
        section.notes.faults.append(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {sequences}: {sequences} would do"
        )
    is_chunked = section.switch("--enable-chunked-prefill", True)
    length = section.values.get("--max-model-len", 0)
    if not is_chunked and isinstance(length, int) and tokens < length:
        section.notes.faults.append(
            f"--max-num-batched-tokens {tokens} is below --max-model-len {length} without chunked prefill: "
            f"{length} would do"
        )


def _launch(section: Section, sizes: Mapping[str, int]) -> Launch:
    assumed = section.notes.assumed
    if "--max-num-seqs" not in section:
        assumed.append("--max-num-seqs 256: the default below 70 GiB (1024 above)")
    if "--gpu-memory-utilization" not in section:
        assumed.append("--gpu-memory-utilization 0.92: the default")
    if section.values.get("--dtype", "auto") == "auto":
        assumed.append("--dtype auto: bfloat16 is taken, as in most checkpoints")
    spread = section.switch("--enable-expert-parallel", False)
    share = section.values.get("--gpu-memory-utilization")
    is_share = isinstance(share, (int, float)) and 0 < share <= 1
    length = section.values.get("--max-model-len", "auto")
    if sizes["prefill-context"] > 1:
        section.notes.unpriced.append("--prefill-context-parallel-size: ranks of prefill only are priced in all steps")
    return Launch(
        phase="decode",
        replicate=sizes["data"],
        tensor=sizes["tensor"],
        pipeline=sizes["pipeline"],
        context=sizes["prefill-context"],
        expert=sizes["tensor"] * sizes["prefill-context"] * sizes["data"] if spread else 1,
        micro_batch=section.number("--max-num-seqs", 256),
        seq=None if length in ("auto", "-1") else section.number("--max-model-len", 8192),
        dtype=section.choice("--dtype", DTYPES, "auto"),
        compiled=not section.switch("--enforce-eager", False)
        and section.values.get("--optimization-level") not in (0, "0"),
        offload=section.values.get("--cpu-offload-gb") not in (None, 0, 0.0),
        gpu_memory_share=float(share) if isinstance(share, (int, float)) and is_share else None,
    )


def write(launch: Launch, model: str) -> str:
    """Return the command line of a vLLM server.

    Raises:
        JobError: vLLM cannot say the launch.
    """
    check_sayable(launch, TITLE, SAYS, _reasons(launch), phase="decode")
    degrees = {
        "--tensor-parallel-size": launch.tensor,
        "--pipeline-parallel-size": launch.pipeline,
        "--data-parallel-size": launch.replicate,
        "--prefill-context-parallel-size": launch.context,
    }
    lines = [f"vllm serve {shlex.quote(model)}"]
    lines.extend(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)
    if launch.expert > 1:
        lines.append("--enable-expert-parallel")
    lines.append(f"--max-num-seqs {launch.micro_batch}")
    if launch.seq is not None:
        lines.append(f"--max-model-len {launch.seq}")
    lines.append(f"--dtype {_dtype_name(launch)}")
    if launch.gpu_memory_share is not None:
        lines.append(f"--gpu-memory-utilization {launch.gpu_memory_share}")
    if not launch.compiled:
        lines.append("--enforce-eager")
    comment = f"# {TITLE}: {model} on {launch.ranks} devices, written by shardplan.\n"
    return "#!/bin/sh\n" + comment.replace("\r", " ") + " \\\n  ".join(lines) + "\n"


def _dtype_name(launch: Launch) -> str:
    return next((name for name, dtype in DTYPES.items() if dtype == launch.dtype), launch.dtype)


def _reasons(launch: Launch) -> list[str]:
    width = launch.tensor * launch.context * launch.replicate
    share = launch.gpu_memory_share
    checks = {
        f"a batch of {launch.batch}": launch.global_batch != launch.micro_batch * launch.data,
        f"experts on {launch.expert} of {width} ranks": launch.expert not in (1, width),
        f"the dtype {launch.dtype}": launch.dtype not in DTYPES.values(),
        f"{share} of a device's memory": share is not None and not 0 < share <= 1,
    }
    return [reason for reason, holds in checks.items() if holds]


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how vLLM runs a model, as far as the price depends on it: fused kernels, and CUDA graphs if compiled.

    There are parameters only, in the dtype of compute; GEMMs of QKV and of gate and up are fused.
    """
    nbytes = 4 if launch.dtype == "fp32" else 2
    kernels = KernelOptions(
        attention="flash3" if arch == "sm90" else "flash2",
        fused_ops=True,
        host_ops_per_layer=0 if launch.compiled else 20,
    )
    state = StateOptions(parameter_nbytes=nbytes, gradient_nbytes=0, optimizer_nbytes=0.0)
    return replace(Implementation(), kernels=kernels, state=state)


def _says_experts(launch: Launch) -> tuple[str, ...]:
    return ("--enable-expert-parallel" if launch.expert > 1 else "--no-enable-expert-parallel",)


SAYS = {
    "replicate": flag("--data-parallel-size {}", "replicate"),
    "tensor": flag("--tensor-parallel-size {}", "tensor"),
    "pipeline": flag("--pipeline-parallel-size {}", "pipeline"),
    "context": flag("--prefill-context-parallel-size {}", "context"),
    "expert": _says_experts,
    "micro_batch": flag("--max-num-seqs {}", "micro_batch"),
    "batch": lambda launch: (),
    "seq": lambda launch: (f"--max-model-len {'auto' if launch.seq is None else launch.seq}",),
    "dtype": lambda launch: (f"--dtype {_dtype_name(launch)}",),
    "compiled": lambda launch: ("--no-enforce-eager" if launch.compiled else "--enforce-eager",),
    "gpu_memory_share": lambda launch: (f"--gpu-memory-utilization {launch.gpu_memory_share or 0.92}",),
}

VLLM = Framework(
    name="vllm",
    title="vLLM",
    version=VERSION,
    file="serve.sh",
    recognises=recognises,
    read=read,
    write=write,
    says=SAYS,
    implementation=implementation,
    key_value_heads="copied",
    vocabulary="padded to 64",
    stages="free",
    planners=("tp", "ddp"),
    limits={"dtype": ("bf16", "fp16", "fp32")},
)
