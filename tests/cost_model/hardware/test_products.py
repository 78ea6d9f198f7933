"""The catalogue's device for a GPU as its driver reports it."""

import pytest

from cost_model.hardware.products import device_of_product, named_device
from cost_model.hardware.reading import ClusterError


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA GB200", "gb200-nvl72-186gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("NVIDIA L40", None),
        ("NVIDIA A1000", None),
    ],
)
def test_a_product_has_its_device(product: str, name: str | None) -> None:
    device = named_device(product)
    assert (None if device is None else device.name) == name


def test_a_part_of_a_gpu_has_its_own_memory() -> None:
    device = device_of_product("NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory_bytes=10_000_000_000)
    assert (device.name, device.memory_bytes) == ("h100-sxm-80gb-with-10gb", 10_000_000_000)


def test_an_unknown_gpu_is_like_the_nearest_of_its_architecture() -> None:
    device = device_of_product("NVIDIA L40", memory_bytes=47_000_000_000, architecture="sm89")
    assert (device.name, device.memory_bytes) == ("l40s-48gb-with-47gb", 47_000_000_000)
    with pytest.raises(ClusterError, match="not in the catalogue"):
        device_of_product("Voodoo 2", memory_bytes=12_000_000, architecture="sst2")
