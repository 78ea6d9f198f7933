"""The main job end to end on a tiny model: plan it, save the plan, load it, verify its collectives."""

from __future__ import annotations

from pathlib import Path

from api.requests.model_registry import load_model
from api.requests.plan_request import verification
from planner import ShardingPlan, build_plan

CONFIG = Path(__file__).parents[1] / "examples" / "tiny_llama.json"


def test_a_plan_is_made_saved_and_verified(tmp_path: Path) -> None:
    source = load_model(str(CONFIG), batch=8, seq=32, allow_local=True)
    plan = build_plan(source.module, cluster="1x4xtoy", mesh="dp=2,tp=2", batch=8, seq=32, dtype="fp32")
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded.to_dict() == plan.to_dict()
    assert verification(source, loaded).equal
