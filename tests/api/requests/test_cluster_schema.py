"""The schema of a cluster's object says what can be sent: all that a cluster writes, and the examples of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from api.requests.cluster_schema import cluster_schema
from api.requests.schemas import EstimateRequest, PlanRequest
from cost_model.hardware.cluster import CLUSTER_KEYS, ClusterError, ClusterSpec
from cost_model.hardware.devices import device_keys, device_names
from cost_model.hardware.sweep import make_sweep

SCHEMA = cluster_schema()
DOCS = (Path(__file__).parents[3] / "docs/reference/cluster-format.md").read_text(encoding="utf-8")


def is_described(cluster: Any) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(cluster)


def test_the_schema_is_one_and_has_each_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert tuple(SCHEMA["properties"]) == CLUSTER_KEYS
    device = SCHEMA["properties"]["device"]["anyOf"][1]
    assert tuple(device["properties"]) == device_keys()
    for owner in (SCHEMA, device):
        undescribed = [name for name, schema in owner["properties"].items() if not schema.get("description")]
        assert undescribed in ([], ["name"])


@pytest.mark.parametrize("model", [PlanRequest, EstimateRequest])
def test_requests_describe_their_clusters(model: Any) -> None:
    kinds = model.model_json_schema()["properties"]["cluster"]["anyOf"]
    assert [kind["type"] for kind in kinds] == ["string", "object"]
    assert kinds[1] == SCHEMA


def test_all_that_a_cluster_writes_is_described() -> None:
    sweep = make_sweep("all_reduce", 2, 8, [(1e6, 1e-3), (1e7, 1e-2)])
    clusters = [ClusterSpec.parse(f"2x8x{name}") for name in device_names()]
    clusters.append(ClusterSpec.parse("2x8xh100-sxm-80gb + 4x8xa100-sxm-80gb"))
    clusters.append(ClusterSpec.from_dict({**clusters[0].to_dict(), "reserved_gb": [1, 2]}).with_sweep(sweep))
    for cluster in clusters:
        document = cluster.to_dict()
        assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)) == []


def test_the_examples_of_the_docs_are_described() -> None:
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)]
    assert len(examples) == 2
    for example in examples:
        assert is_described({**example, "sweeps": []}), "files are not read for a client"


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "toy"},
        {"devices_per_node": "four", "device": "toy"},
        {"devices_per_node": 4, "device": "toy", "colour": "red"},
        {"devices_per_node": 4, "device": {"like": "toi"}},
        {"devices_per_node": 4, "device": {"like": "toy", "memory": 1}},
        {"devices_per_node": 4, "device": "toy", "sweeps": ["file.txt"]},
        {"devices_per_node": 4, "device": "toy", "rail_optimized": "yes"},
    ],
)
def test_what_is_refused_is_not_described(wrong: dict[str, Any]) -> None:
    assert not is_described(wrong)
    with pytest.raises(ClusterError):
        ClusterSpec.from_dict(wrong)
