"""``/v1/clusters`` and ``/v1/models``: the devices and the models that a request can name."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from api.http.auth import Caller, needs
from api.http.problems import problem_responses
from api.requests.model_configs import preset_names, read_preset
from api.requests.schemas import DeviceList, DeviceSummary, ModelList, ModelSummary
from cost_model.hardware.cluster import device_names, find_device

router = APIRouter(prefix="/v1", tags=["catalogue"])

Reader = Annotated[Caller, Depends(needs("read"))]


@router.get("/clusters", response_model=DeviceList, responses=problem_responses())
def clusters(caller: Reader) -> DeviceList:
    """List the devices that a cluster can be made of: ``4x8xNAME`` is 4 nodes of 8."""
    return DeviceList(devices=[_device(name) for name in device_names()])


@router.get("/models", response_model=ModelList, responses=problem_responses())
def models(caller: Reader) -> ModelList:
    """List the models that can be named; any other is given as its ``hf_config``."""
    return ModelList(models=[_model(name) for name in preset_names()])


def _device(name: str) -> DeviceSummary:
    device = find_device(name)
    return DeviceSummary(
        name=device.name,
        kind=device.kind,
        memory_bytes=device.memory_bytes,
        peak_flops=dict(device.flop_rates),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        intra_node=device.intra_node.name,
        inter_node=device.inter_node.name,
    )


def _model(name: str) -> ModelSummary:
    values = read_preset(name).values
    return ModelSummary(name=name, model_type=values["model_type"], max_seq=values.get("max_position_embeddings"))
