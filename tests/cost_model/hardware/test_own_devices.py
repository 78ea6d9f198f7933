"""Devices of one's own: inheritance by ``like``, and the documented fields against those that are read."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from cost_model.hardware.cluster import CLUSTER_KEYS, ClusterError, ClusterSpec, device_names, find_device
from cost_model.hardware.devices import DeviceSpec, LinkSpec, device_keys, read_device

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cluster-format.md"
H100 = find_device("h100-sxm-80gb")


def cluster_of(device: object) -> ClusterSpec:
    return ClusterSpec.from_dict({"nodes": 2, "devices_per_node": 8, "device": device})


def test_a_device_like_another_differs_in_the_fields_that_it_names() -> None:
    own = {"like": "H100-SXM-80GB", "name": "Ours", "memory_bytes": 102e9, "inter_node": {"efficiency": 0.5}}
    cluster = cluster_of(own)
    assert cluster.device == dataclasses.replace(
        H100,
        name="ours",
        memory_bytes=102_000_000_000,
        inter_node=dataclasses.replace(
            H100.inter_node, efficiency=0.5, source=f"{H100.inter_node.name} with figures given by the user"
        ),
        source="h100-sxm-80gb with figures given by the user",
    )
    assert cluster.name == "2x8xours"
    written = json.loads(json.dumps(cluster.to_dict()))
    assert "like" not in written["device"], "a plan keeps the figures, not a reference to a catalogue that changes"
    assert ClusterSpec.from_dict(written) == cluster


def test_a_device_like_another_keeps_its_name_where_none_is_given() -> None:
    assert read_device({"like": "toy", "memory_bytes": 1e6}).name == "toy"
    toy = find_device("toy")
    assert dataclasses.replace(read_device({"like": "toy"}), source=toy.source) == toy


def test_a_file_in_json_is_read_as_one_in_yaml(tmp_path: Path) -> None:
    data = {"devices_per_node": 4, "device": {"like": "l4-24gb", "name": "ours", "memory_bytes": 20e9}}
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(data))
    assert ClusterSpec.parse(file) == ClusterSpec.from_dict(data)


@pytest.mark.parametrize(
    ("device", "parts"),
    [
        ({"like": "h100"}, ["cluster.device.like", "unknown device 'h100'", *device_names()]),
        ({"like": 3}, ["cluster.device.like must be the name of a device", *device_names()]),
        ({"like": "toy", "memory": 1}, ["unknown key 'memory'", "memory_bytes"]),
        ({"like": "toy", "flop_rates": []}, ["unknown key 'flop_rates'", "peak_flops"]),
        ({"like": "toy", "name": 3}, ["cluster.device.name must be text"]),
        ({"like": "toy", "name": "l4-24gb"}, ["another device called 'l4-24gb'", "name of your own"]),
        ({"memory_bytes": 1}, ["needs a name, or `like`"]),
    ],
)
def test_rejected_devices_name_the_place(device: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster_of(device)
    for part in parts:
        assert part in str(caught.value)


def test_no_device_has_more_memory_than_its_driver_shows() -> None:
    shown_mib = {  # nvidia-smi: modal-labs/modal-client pull request #2797, NVIDIA/TensorRT-LLM issue #10278
        "a100-sxm-40gb": 40960,
        "a100-sxm-80gb": 81920,
        "h100-sxm-80gb": 81559,
        "a10-24gb": 23028,
        "l40s-48gb": 46068,
        "l4-24gb": 23034,
        "b200-sxm-180gb": 183359,
    }
    for name, mib in shown_mib.items():
        assert 0.97 * mib < find_device(name).memory_bytes / 2**20 < mib


@pytest.mark.parametrize(
    ("heading", "read", "defaults"),
    [
        ("Cluster", CLUSTER_KEYS, ClusterSpec),
        ("Device", device_keys(), DeviceSpec),
        ("Link", tuple(item.name for item in dataclasses.fields(LinkSpec)), LinkSpec),
    ],
)
def test_the_page_lists_every_field_with_its_default(heading: str, read: tuple[str, ...], defaults: type) -> None:
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", section, flags=re.MULTILINE)
    documented = {name: default.strip() for name, _, default, _ in rows}
    assert set(documented) == set(read)
    for field in dataclasses.fields(defaults):
        text = documented.get(field.name, "none")
        if field.default == () or (
            field.default is dataclasses.MISSING and (defaults is ClusterSpec or field.name == "name")
        ):
            continue
        if field.name == "flop_rates":
            assert documented["peak_flops"] == "required"
        elif field.default is dataclasses.MISSING:
            assert text == "required", field.name
        elif isinstance(field.default, bool):
            assert text == str(field.default).lower(), field.name
        elif isinstance(field.default, (int, float)):
            assert float(text) == field.default, field.name
        else:
            assert text == (field.default or "empty"), field.name
    assert all(meaning.strip() for *_, meaning in rows)
