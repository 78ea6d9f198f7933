"""Environments of frameworks that are not installed here: each with the framework and what its parser needs.

An environment sees the packages of this one, and its own before them. What a parser imports and does not use (kernels,
data sets) is replaced by stubs, so that a framework is imported without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What is installed without its dependencies, and the modules that are replaced by stubs."""

    packages: tuple[str, ...]
    stubs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


ENVIRONMENTS: Mapping[str, Environment] = {
    "deepspeed": Environment(
        packages=("deepspeed==0.19.8", "hjson", "msgpack", "py-cpuinfo", "einops"), options=("--no-build-isolation",)
    ),
    "torchtitan": Environment(
        packages=("torchtitan==0.3.0", "tyro", "docstring_parser", "typeguard", "spmd_types==0.2.3", "torchdata"),
        stubs=(
            *("triton", "datasets", "tensorboard", "google", "torch_checkpointing", "tiktoken", "wandb"),
            "einops",
        ),
    ),
    "megatron-bridge": Environment(
        packages=(
            *("megatron-bridge==0.3.1", "megatron-core==0.16.1", "omegaconf", "hydra-core==1.3.2", "einops"),
            "antlr4-python3-runtime==4.9.3",
        ),
        stubs=(
            *("transformer_engine", "triton", "datasets", "google", "tensorboard", "wandb", "modelopt", "mamba_ssm"),
            *("nvidia_resiliency_ext", "causal_conv1d", "fla", "timm", "open_clip", "mlflow", "qwen_vl_utils", "nvtx"),
            *(
                "multistorageclient",
                "tensorstore",
                "nemo_run",
                "sentencepiece",
                "tiktoken",
                "PIL",
                "six",
                "ftfy",
                "webdataset",
                "lightning",
            ),
        ),
    ),
    "vllm": Environment(
        packages=(
            *("vllm==0.33.0", "cbor2", "aiohttp", "multidict", "yarl", "propcache", "aiohappyeyeballs", "aiosignal"),
            *("frozenlist", "openai", "openai-harmony", "sniffio", "pybase64", "py-cpuinfo", "cachetools", "msgspec"),
            *("cloudpickle", "einops"),
        ),
        stubs=(
            "xgrammar",
            "gguf",
            "partial_json_parser",
            "llguidance",
            "outlines_core",
            "lmformatenforcer",
            "prometheus_fastapi_instrumentator",
        ),
    ),
}

_STUBS = """
import importlib.abc, importlib.machinery, sys
from unittest.mock import MagicMock
import torch, torch._dynamo, torch.utils.flop_counter  # before the stubs, which torch takes for the real ones
torch.compile = lambda function=None, **options: function or (lambda wrapped: wrapped)

class _Stub(MagicMock):
    __path__ = []
    __version__ = "9.9.9"
    __spec__ = None

class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in STUBS else None
    def create_module(self, spec):
        return _Stub(name=spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, _Finder())
"""


def folder() -> Path:
    """Return where environments are kept: $SHARDPLAN_FRAMEWORKS, or a folder of the user's cache."""
    given = os.environ.get("SHARDPLAN_FRAMEWORKS")
    return Path(given) if given else Path.home() / ".cache" / "shardplan" / "frameworks"


def run_in(name: str, script: str, *arguments: str) -> Any:
    """Return what ``script`` prints as JSON in its last line, run in a framework's environment.

    The test is skipped where the environment cannot be made: the registry is not reached, say.
    """
    environment = ENVIRONMENTS[name]
    python = _python(name, environment)
    text = f"STUBS = {environment.stubs!r}\n{_STUBS if environment.stubs else ''}\n{script}"
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    result = subprocess.run(
        [str(python), "-c", text, *arguments], capture_output=True, text=True, env=variables, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def _python(name: str, environment: Environment) -> Path:
    """Return the interpreter of an environment, which is made if it is not there."""
    place = folder() / name
    python = place / "bin" / "python"
    done = place / "done.txt"
    wanted = "\n".join(environment.packages)
    if done.exists() and done.read_text() == wanted:
        return python
    venv.create(place, clear=True, symlinks=True)
    site = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    result = subprocess.run(
        [*command, *environment.options, *environment.packages],
        capture_output=True,
        text=True,
        env={**os.environ, "DS_BUILD_OPS": "0"},
        timeout=900,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"{name} could not be installed: {result.stderr.strip()[-500:]}")
    done.write_text(wanted)
    return python
