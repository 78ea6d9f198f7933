"""GPUs as drivers report them, and the catalogue's devices for them."""

import pytest

from cost_model.hardware.cluster import ClusterError
from cost_model.hardware.devices import device_names, find_device
from cost_model.hardware.products import device_of_product, named_device

ENOUGH = 10**12


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GB200", "gb200-nvl72-186gb"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA A10", "a10-24gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("AMD Instinct MI250X", "mi250x-64gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("AMD Instinct MI325X", "mi325x-256gb"),
        ("AMD Instinct MI355X", "mi355x-288gb"),
    ],
)
def test_a_known_product_is_a_device_of_the_catalogue(product: str, name: str) -> None:
    assert device_of_product(product, memory_bytes=ENOUGH) == find_device(name)


def test_every_gpu_of_the_catalogue_has_a_product() -> None:
    source = __import__("cost_model.hardware.products", fromlist=["_PRODUCTS"])._PRODUCTS
    gpus = {name for name in device_names() if find_device(name).kind != "cpu"}
    assert {name for _, name in source} == gpus


@pytest.mark.parametrize("product", ["NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA A10G", "NVIDIA H20", "Abacus"])
def test_a_name_that_only_contains_that_of_a_device_is_another_product(product: str) -> None:
    assert named_device(product) is None


def test_a_part_of_a_gpu_has_its_own_memory() -> None:
    device = device_of_product("NVIDIA H100 80GB HBM3 MIG 3g.40gb", memory_bytes=42 * 10**9)
    assert (device.name, device.memory_bytes) == ("h100-sxm-80gb-with-42gb", 42 * 10**9)
    assert device.peak_flops == find_device("h100-sxm-80gb").peak_flops


def test_a_product_without_an_entry_has_the_figures_of_its_architecture_and_its_own_memory() -> None:
    device = device_of_product("NVIDIA H20", memory_bytes=96 * 10**9, architecture="sm90")
    assert (device.name, device.memory_bytes) == ("h100-nvl-94gb-with-96gb", 96 * 10**9)
    assert "NVIDIA H20" in device.source


def test_a_product_of_no_known_architecture_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"'Abacus' is not in the catalogue.*shardplan calibrate"):
        device_of_product("Abacus", memory_bytes=ENOUGH, architecture="sm999")
