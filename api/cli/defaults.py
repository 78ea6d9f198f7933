"""`with_assumed`: a command's options with the cluster, batch and sequence length that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.defaults.job import ModelConfig


def with_assumed(model: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``options`` for the model ``model`` with what they lack, and a line on each value that was assumed.

    Raises:
        PlannerError, ClusterError: the model or the user's cluster cannot be read.
    """
    from api.requests.model_configs import find_config

    config = find_config(model, allow_local=True)  # a misspelt model is reported before torch is imported
    needed = ("cluster", "batch") if config is None else ("cluster", "batch", "seq")
    if all(options[name] is not None for name in needed):
        return dict(options), ()
    from cost_model import ClusterSpec

    if options["cluster"] is not None:
        ClusterSpec.parse(options["cluster"])  # so is a misspelt cluster
    from planner.defaults.job import ModelConfig, with_defaults

    if config is None:
        of_model = _config_of_factory(model, options)
    elif options["seq"] is not None:
        of_model = ModelConfig(values=config.values, takes_seq=False)
    else:
        from api.requests.model_registry import full_config

        values, takes_seq = full_config(config)
        of_model = ModelConfig(values=values, takes_seq=takes_seq)
    full, assumed = with_defaults(options, of_model)
    if isinstance(full["cluster"], ClusterSpec):
        full["cluster"] = full["cluster"].to_dict()
    return full, assumed


def _config_of_factory(model: str, options: Mapping[str, Any]) -> ModelConfig | None:
    """Return the config from which the inputs of a factory's module are made; None: the factory gives its inputs."""
    from api.requests.factories import call_factory, needs_batch
    from api.requests.model_configs import without_suffix
    from planner.defaults.job import ModelConfig, config_of

    factory = without_suffix(model)
    if options["batch"] is None and needs_batch(factory):
        return ModelConfig(values={}, takes_seq=False)
    result = call_factory(factory, batch=options["batch"], seq=options["seq"])
    return config_of(result.module) if result.example_inputs is None else None
