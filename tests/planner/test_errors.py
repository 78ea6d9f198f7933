"""The error tree: exit codes, messages, data that survives a process boundary, and no torch."""

import pickle
import subprocess
import sys

import pytest

from planner import errors
from planner.errors import InfeasibleError, PlannerError


def every_class(root: type[PlannerError] = PlannerError) -> list[type[PlannerError]]:
    """Return the tree of this file; other packages hang their own errors on it, once they are imported."""
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(found for child in children for found in every_class(child))]


EXAMPLES = [
    errors.ModelError("no such layer", what_to_do="look", module="layers.3"),
    errors.UnsupportedOpError([("aten.conv1d.default", "m.*", "forward")]),
    errors.JobError("batch is 0.", field="batch"),
    errors.PlanFormatError("truncated", file="plan.json", where="line 3"),
    errors.PlanMismatchError("another model", subject="model", expected="a", found="b"),
    errors.PlanTypeError("a tensor", field="plan", key="fc1.weight"),
    errors.PlanLayoutError("uneven", field="plan", key="fc1.weight"),
    errors.WeightsError("names", missing=["a"], unexpected=["b"], mismatched={"c": ((1,), (2,))}),
    errors.RanksError("they differ", ranks=(1, 2)),
    errors.RunError("it fails", module="layers.3", op="aten.view([2, 3])"),
    errors.EmptyPathError("the root", field="plan", key=""),
    errors.UnmatchedKeyError("nothing", field="plan", key="fc9"),
    errors.KeyConflictError("two", field="plan", key="a", other="b", what_to_do="keep one"),
    InfeasibleError(budget_bytes=10**9, least_bytes=2 * 10**9, largest_tensors=(("lm_head.weight", 5 * 10**8),)),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_with_their_data(error: PlannerError) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    assert again.args == error.args


def test_every_class_is_drawn_in_the_tree_and_has_its_own_title() -> None:
    assert errors.__doc__ is not None
    for cls in every_class():
        assert f"{cls.__name__} " in errors.__doc__
    titles = [cls.title for cls in every_class()]
    assert len(set(titles)) == len(titles)


def test_exit_codes() -> None:
    codes = {cls.__name__: cls.exit_code for cls in every_class() if cls.exit_code != 2}
    assert codes == {"InfeasibleError": 3, "RunError": 4, "SolverError": 1}


def test_errors_are_the_built_in_ones_that_torch_raises() -> None:
    assert issubclass(errors.EmptyPathError, KeyError)
    assert issubclass(errors.UnmatchedKeyError, AttributeError)
    assert issubclass(errors.KeyConflictError, RuntimeError)
    assert issubclass(errors.PlanTypeError, TypeError)
    # KeyError alone would print the message's repr.
    assert str(errors.EmptyPathError("the root.", field="plan", key="", what_to_do="Name it.")) == "the root. Name it."


def test_infeasible_says_what_would_do() -> None:
    error = InfeasibleError(
        budget_bytes=16 * 10**9, least_bytes=23_400_000_000, largest_tensors=(("lm_head.weight", 1_050_000_000),)
    )
    assert error.detail == (
        "No plan fits 16.00 GB per device; the least that would do is 23.40 GB (23400000000 bytes) per device; "
        "the largest tensors are lm_head.weight (1.05 GB)."
    )
    assert error.what_to_do == "Allow that much memory. Offloading to host memory is not planned here."


def test_infeasible_says_what_is_proved_where_the_least_is_not() -> None:
    error = InfeasibleError(
        budget_bytes=10**9, least_bytes=12 * 10**9, bound_bytes=10 * 10**9, enough="2x8xtoy",
        remedies=("more micro-batches (--micro-batches)",),
    )  # fmt: skip
    assert "at least 10.00 GB per device are needed, and 12.00 GB (12000000000 bytes) would do" in error.detail
    assert "use a cluster of 2x8xtoy or more micro-batches" in error.what_to_do
    assert "--ac" not in error.what_to_do


def test_unsupported_ops_are_all_named() -> None:
    error = errors.UnsupportedOpError([("aten.conv1d.default", "m.*", "forward"), ("aten.x", "", "backward")])
    assert "2 ops" in error.detail
    assert "aten.conv1d.default in m.* (forward); aten.x in the root module (backward)" in error.detail


def test_importing_the_errors_and_the_job_imports_no_torch() -> None:
    code = "import sys, planner.errors, planner.plan.job; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
