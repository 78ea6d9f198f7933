"""The fit of ``cost_model/kernels/efficiency.toml`` to the calibration sources of gemm.csv.

Losses are means of absolute log errors, so that outliers have little influence. All sources have equal weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, TypeVar

from cost_model.kernels.efficiency import Efficiency, FlashEfficiency, GemmEfficiency, PassEfficiency, UnfusedEfficiency
from published.fit.pattern_search import minimise
from published.fit.toml_text import four_digits
from published.rows.gemm import (
    AttentionCase,
    OutOfScopeError,
    attention_case,
    device_of,
    dtype_of,
    gemm_row_time_s,
    grouped_row_time_s,
    shape_of,
)
from published.rows.priced_row import calibration_sources, read

HEADER = """Fitted constants of GEMMs and attention; efficiency.py describes each. Written by
benchmarks/calibrate_from_published.py on {date}; do not edit. Fitted to the calibration sources of gemm.csv
(benchmarks/published/rows/split.toml), which each table names with its rows. Shares and ratios have no unit; cost and
fill_keys count head dims and keys, *_bytes bytes per score, *_s seconds."""
Row = Mapping[str, str]
_Constants = TypeVar("_Constants", GemmEfficiency, PassEfficiency, UnfusedEfficiency)
_BEST_SHAPE = "torch.matmul best shape"
_SHAPE_ONLY = "issue #6523"  # form and clock of its A100 are not stated: only the fall-off with size is used
_LEAST_SIZE = 512  # smaller GEMMs measure the host
_SMOOTH = 0.05
_LUCK = 0.06  # largest excess of the best shape of a search over a usual shape. Assumed
_HALF = ("bf16", "fp16")
_HEAD_DIMS = (64, 128, 256)

_START = Efficiency(
    gemm=GemmEfficiency(
        sustained=1.0,
        wave_rounding=0.5,
        medium_tile=0.85,
        small_tile=0.7,
        fp8=(("default", 1.0),),
        grouped=(("default", 1.0),),
        misaligned=1.0,
        isolated_launch_s=6e-6,
    ),
    flash=(),
    unfused=UnfusedEfficiency(
        forward_bytes=9.0, backward_bytes=18.0, causal_forward_bytes=9.0, causal_backward_bytes=9.0
    ),
)


def calibrate(folder: Path) -> dict[str, object]:
    """Return the tables of ``efficiency.toml``, each with the sources and rows that it was fitted to.

    Raises:
        ValueError: the folder lacks rows that a constant needs.
    """
    rows = [row for row in read(folder, "gemm.csv") if row["source"] in calibration_sources()["gemm.csv"]]
    if not rows:
        raise ValueError(f"{folder} has no calibration rows of gemm.csv")
    gemm, gemm_rows = _fit_gemm(rows)
    fitted = replace(_START, gemm=gemm)
    flash: dict[str, object] = {}
    for kernel in ("flash2", "flash3", "cudnn", "flash4"):
        fitted, flash[kernel] = _fit_flash(rows, kernel, fitted)
    unfused, unfused_rows = _fit_unfused(rows, fitted)
    return {
        "gemm": {
            **_provenance(gemm_rows),
            **{name: getattr(gemm, name) for name in _GEMM_NAMES},
            "fp8": dict(gemm.fp8),
            "grouped": dict(gemm.grouped),
        },
        "flash": flash,
        "unfused": {
            **_provenance(unfused_rows),
            **{name: getattr(unfused, name) for name in UnfusedEfficiency.__slots__},
        },
    }


_GEMM_NAMES = (
    "sustained",
    "wave_rounding",
    "medium_tile",
    "small_tile",
    "misaligned",
    "isolated_launch_s",
)


def _provenance(rows: Sequence[Row]) -> dict[str, object]:
    return {
        "sources": sorted({row["source"] for row in rows}),
        "rows": sorted({row["row_id"] for row in rows}),
    }


def _mean_error(errors: Mapping[str, Sequence[float]]) -> float:
    """Return the mean over sources of the mean absolute log error, smoothed below 5 %."""
    return mean(mean(math.hypot(error, _SMOOTH) for error in of_source) for of_source in errors.values())


# --- GEMMs ----------------------------------------------------------------------------------------


def _gemm_log_error(row: Row, efficiency: Efficiency) -> float:
    m, n, k = shape_of(row)
    seconds = gemm_row_time_s(row, device_of(row)[0], efficiency)
    return math.log(2 * m * n * k / seconds / 1e12 / float(row["tflops"]))


def _fit_gemm(rows: Sequence[Row]) -> tuple[GemmEfficiency, list[Row]]:
    """Return the fitted constants of GEMMs, and the rows that were used.

    The fall-off with size is fitted first. Then fp8, misaligned and grouped GEMMs are ratios to its result.
    """
    known = [row for row in rows if row["kind"] == "gemm" and _is_cuda(row)]
    ramps = [row for row in known if row["op"].startswith("cuBLAS") and min(shape_of(row)) >= _LEAST_SIZE]
    best = [row for row in known if row["op"] == _BEST_SHAPE]
    bounds = [row for row in best if dtype_of(row) in _HALF]

    def constants(point: Mapping[str, float]) -> GemmEfficiency:
        figures: dict[str, Any] = {name: value for name, value in point.items() if name not in ("level", "launch_us")}
        return replace(_START.gemm, **figures, isolated_launch_s=point["launch_us"] * 1e-6)

    def loss(point: Mapping[str, float]) -> float:
        shares = [point[name] for name in ("wave_rounding", "medium_tile", "small_tile", "level", "sustained")]
        if min(point.values()) < 0 or max(shares) > 1 or point["small_tile"] > point["medium_tile"]:
            return math.inf
        priced = replace(_START, gemm=constants(point))
        slower = replace(_START, gemm=replace(priced.gemm, sustained=point["sustained"] * point["level"]))
        errors: dict[str, list[float]] = defaultdict(list)
        for row in ramps:
            errors[row["source"]].append(_gemm_log_error(row, slower if _SHAPE_ONLY in row["source"] else priced))
        for row in bounds:
            error = _gemm_log_error(row, priced)
            errors[row["source"]].append(max(error, 0.0) + min(error + _LUCK, 0.0))
        return _mean_error(errors)

    start = {
        "sustained": 0.95,
        "wave_rounding": 0.5,
        "medium_tile": 0.85,
        "small_tile": 0.7,
        "launch_us": 6.0,
        "level": 0.8,
    }
    steps = {
        "sustained": 0.05,
        "wave_rounding": 0.2,
        "medium_tile": 0.05,
        "small_tile": 0.05,
        "launch_us": 2.0,
        "level": 0.05,
    }
    starts = [{**start, "wave_rounding": rounding} for rounding in (0.1, 0.5, 0.9)]
    gemm = constants(min((minimise(loss, point, steps) for point in starts), key=lambda result: result[1])[0])
    gemm = replace(gemm, fp8=_fp8_ratios(best))
    misaligned, aligned_rows = _misaligned(known)
    grouped, grouped_rows = _grouped_ratio(rows, replace(_START, gemm=gemm))
    gemm = replace(gemm, misaligned=misaligned, grouped=grouped)
    return _rounded(gemm), [*ramps, *best, *aligned_rows, *grouped_rows]


def _is_cuda(row: Row) -> bool:
    try:
        return device_of(row)[0].kind == "cuda"
    except OutOfScopeError:
        return False


def _fp8_ratios(best: Sequence[Row]) -> tuple[tuple[str, float], ...]:
    """Return, by architecture, the fp8 share of the peak at the best shapes, over the device's ``gemm_efficiency``."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in best:
        device = device_of(row)[0]
        if dtype_of(row) == "fp8":
            share = float(row["tflops"]) * 1e12 / device.peak_flops["fp8"] / device.gemm_efficiency
            ratios[device.architecture].append(min(1.0, share))
    figures = {architecture: geometric_mean(values) for architecture, values in ratios.items()}
    figures["default"] = geometric_mean(list(figures.values())) if figures else 1.0
    return tuple(sorted(figures.items()))


def _misaligned(known: Sequence[Row]) -> tuple[float, list[Row]]:
    """Return the rate of bmm rows whose n is no multiple of 8, over that of the other bmm rows; and all bmm rows."""
    rows = [row for row in known if row["op"].startswith("bmm")]
    odd = [float(row["tflops"]) for row in rows if shape_of(row)[1] % 8]
    even = [float(row["tflops"]) for row in rows if not shape_of(row)[1] % 8]
    if not odd or not even:
        raise ValueError("no calibration source has shapes of both kinds of alignment")
    return mean(odd) / mean(even), rows


def _grouped_ratio(rows: Sequence[Row], efficiency: Efficiency) -> tuple[tuple[tuple[str, float], ...], list[Row]]:
    """Return, by architecture, the rate of torch's 16-bit grouped kernel over that of one GEMM, and the rows."""
    ratios: dict[str, list[float]] = defaultdict(list)
    used = [row for row in rows if row["kind"] == "grouped gemm" and dtype_of(row) in _HALF and row["tflops"]]
    for row in used:
        device = device_of(row)[0]
        flops, seconds = grouped_row_time_s(row, device, efficiency)
        ratios[device.architecture].append(float(row["tflops"]) * 1e12 / (flops / seconds))
    figures = {architecture: geometric_mean(values) for architecture, values in ratios.items()}
    figures["default"] = 1.0
    return tuple(sorted(figures.items())), used


# --- attention ------------------------------------------------------------------------------------------------------


def _fit_flash(rows: Sequence[Row], kernel: str, fitted: Efficiency) -> tuple[Efficiency, dict[str, object]]:
    """Return ``fitted`` with the constants of ``kernel`` added, and the kernel's TOML table."""
    cases = _cases(rows, kernel, fitted)
    forward = _fit_pass([case for case in cases if case[2].passes == "fwd" and case[0]["trust"] != "C"], fitted, kernel)
    known = replace(fitted, flash=(*fitted.flash, (kernel, _flash(forward, forward))))
    both = [case for case in cases if case[2].passes == "fwd+bwd"]
    table_rows = [case[0] for case in cases if case[2].passes == "fwd" and case[0]["trust"] != "C"]
    if both:
        backward = _fit_pass(both, known, kernel)
        table_rows += [case[0] for case in both]
    else:
        ratio, ratio_rows = _backward_ratio(rows, known)
        backward = replace(forward, cost=tuple(ratio * cost for cost in forward.cost))
        table_rows += ratio_rows
    flash = _flash(_rounded(forward), _rounded(backward))
    table = {**_provenance(table_rows), "head_dims": list(_HEAD_DIMS)}
    for name, one_pass in (("forward", flash.forward), ("backward", flash.backward)):
        figures = {item: getattr(one_pass, item) for item in PassEfficiency.__slots__}
        table[name] = {**figures, "cost": list(one_pass.cost)}
    return replace(fitted, flash=(*fitted.flash, (kernel, flash))), table


def _flash(forward: PassEfficiency, backward: PassEfficiency) -> FlashEfficiency:
    return FlashEfficiency(head_dims=_HEAD_DIMS, forward=forward, backward=backward)


def _cases(rows: Sequence[Row], kernel: str, fitted: Efficiency) -> list[tuple[Row, float, AttentionCase]]:
    """Return (row, measured seconds, case) of the calibration rows of a kernel."""
    cases = []
    for row in rows:
        if row["kind"] == "attention" and _is_cuda(row):
            try:
                case = attention_case(row)
            except OutOfScopeError:
                continue
            if case.kernel == kernel:
                cases.append((row, case.flops / float(row["tflops"]) / 1e12, case))
    return cases


def _fit_pass(cases: Sequence[tuple[Row, float, AttentionCase]], fitted: Efficiency, kernel: str) -> PassEfficiency:
    """Return the fitted constants of a pass: forward, or backward where ``fitted`` has the kernel's forward."""
    measured_dims = sorted({case.head_dim for _, _, case in cases})
    backward = cases[0][2].passes != "fwd"
    known = dict(fitted.flash).get(kernel)

    def one_pass(point: Mapping[str, float]) -> PassEfficiency:
        cost = [point.get(f"cost{dim}", math.nan) for dim in _HEAD_DIMS]
        for i, dim in enumerate(_HEAD_DIMS):
            if math.isnan(cost[i]):  # no rows: the growth of the forward's cost, or of the head dim
                growth = known.forward.cost[i] / known.forward.cost[i - 1] if known else dim / _HEAD_DIMS[i - 1]
                cost[i] = cost[i - 1] * growth
        return PassEfficiency(
            cost=tuple(cost),
            fill_keys=point["fill_keys"],
            causal_fill_keys=point["causal_fill_keys"],
            imbalance=point["imbalance"],
        )

    def loss(point: Mapping[str, float]) -> float:
        if min(point.values()) < 0:
            return math.inf
        candidate = one_pass(point)
        flash = _flash(known.forward if known else candidate, candidate)
        others = tuple(pair for pair in fitted.flash if pair[0] != kernel)
        efficiency = replace(fitted, flash=(*others, (kernel, flash)))
        errors: dict[str, list[float]] = defaultdict(list)
        for row, seconds, case in cases:
            errors[row["source"]].append(math.log(case.time_s(device_of(row)[0], efficiency) / seconds))
        return _mean_error(errors)

    start = {f"cost{dim}": 1.5 * dim for dim in measured_dims}
    start |= {"fill_keys": 150.0, "causal_fill_keys": 250.0, "imbalance": 0.05}
    steps = {f"cost{dim}": 0.25 * dim for dim in measured_dims}
    steps |= {"fill_keys": 50.0, "causal_fill_keys": 50.0, "imbalance": 0.05}
    assert backward == (known is not None)
    return one_pass(minimise(loss, start, steps)[0])


def _backward_ratio(rows: Sequence[Row], fitted: Efficiency) -> tuple[float, list[Row]]:
    """Return the seconds per FLOP of FlashAttention-3 in backward over forward, in the runs that measured both.

    cuDNN and FlashAttention-4 get the same ratio, since no calibration row has their backward.
    """
    rates: dict[str, list[float]] = defaultdict(list)
    used = [row for row in rows if row["trust"] == "C" and row["op"].startswith("FlashAttention-3")]
    for row in used:
        rates[row["op"].rsplit(" ", 1)[-1]].append(float(row["tflops"]))
    if not rates["fwd"] or not rates["bwd"]:
        raise ValueError("no calibration source has FlashAttention-3 forward and backward")
    return geometric_mean(rates["fwd"]) / geometric_mean(rates["bwd"]), used


def _fit_unfused(rows: Sequence[Row], fitted: Efficiency) -> tuple[UnfusedEfficiency, list[Row]]:
    """Return the bytes per score of attention without a fused kernel, and the rows."""
    cases = _cases(rows, "unfused", fitted)

    def loss(point: Mapping[str, float]) -> float:
        if min(point.values()) < 0:
            return math.inf
        efficiency = replace(fitted, unfused=UnfusedEfficiency(**point))
        errors: dict[str, list[float]] = defaultdict(list)
        for row, seconds, case in cases:
            errors[row["source"]].append(math.log(case.time_s(device_of(row)[0], efficiency) / seconds))
        return _mean_error(errors)

    start = {name: getattr(_START.unfused, name) for name in UnfusedEfficiency.__slots__}
    point = minimise(loss, start, dict.fromkeys(start, 3.0))[0]
    return _rounded(UnfusedEfficiency(**point)), [case[0] for case in cases]


def _rounded(constants: _Constants) -> _Constants:
    """Return the constants with four digits, as in the file."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return four_digits(value) if value > 1e-9 else 0.0
        if isinstance(value, tuple):
            return tuple(short(item) for item in value)
        return value

    figures: dict[str, Any] = {name: short(getattr(constants, name)) for name in type(constants).__slots__}
    return type(constants)(**figures)
