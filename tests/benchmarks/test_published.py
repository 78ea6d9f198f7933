"""The accuracy table on folders of invented measurements: everything is priced or left out with a reason."""

import csv
import json
import sys
from pathlib import Path

import accuracy
import published_memory
import pytest
from published.frameworks.defaults import TABLE
from published.pricing import runs
from published.pricing.checks import CHECKS, figures, holds
from published.rows.priced_row import PricedRow, read
from support.published_rows import INVENTED, RUN

MEMORY = {**RUN, "kind": "measured", "quantity": "peak max_reserved", "value_gib": "50"}
COLLECTIVE = {
    "source": INVENTED, "kind": "measured", "gpu": "H100", "n_gpus": "8", "nodes": "1", "gpus_per_node": "8",
    "collective": "all_reduce", "dtype": "float", "bytes": "1073741824", "time_us": "4000", "trust": "A",
}  # fmt: skip
GEMM = {
    "source": INVENTED, "kind": "gemm", "gpu": "H100 SXM", "dtype": "bf16", "op": "matmul", "M": "4096", "N": "4096",
    "K": "4096", "tflops": "600", "trust": "A",
}  # fmt: skip
FILES = {
    "training_runs.csv": RUN,
    "training_runs_vtrain.csv": RUN,
    "training_runs_mcore_ci.csv": RUN,
    "memory.csv": MEMORY,
    "collectives.csv": COLLECTIVE,
    "gemm.csv": GEMM,
}
QUANTITIES = {
    "training_runs.csv": ["step_time_s"], "training_runs_vtrain.csv": ["step_time_s"],
    "training_runs_mcore_ci.csv": ["step_time_s"], "memory.csv": ["peak_mem_gib"],
    "collectives.csv": ["time_us", "time_us"], "gemm.csv": ["tflops"],
}  # fmt: skip
"""Of each row of a file; a collective is priced without and with a sweep of its cluster."""


def columns(name: str) -> list[str]:
    run = (
        "row_id source source_date model arch params_b layers hidden heads kv_heads ffn vocab seq_len n_experts topk "
        "moe_ffn gpu gpu_mem_gb n_gpus nodes gpus_per_node interconnect dp_replicate fsdp zero_stage tp sp pp vp cp ep "
        "etp mbs gbs grad_accum precision act_ckpt compile optimizer framework config_notes tokens_per_s_per_gpu "
        "step_time_s tflops_per_gpu mfu_pct hfu_pct flop_convention peak_mem_gib mem_stat status step_time_s_derived "
        "trust notes"
    )
    memory = (
        "row_id kind source source_row model layers hidden heads kv_heads ffn vocab seq_len n_experts topk moe_ffn gpu "
        "gpu_mem_gb n_gpus dp_replicate fsdp zero_stage tp sp pp vp cp ep mbs gbs precision act_ckpt compile optimizer "
        "framework quantity value_gib value_other formula mem_stat status trust notes"
    )
    collective = (
        "row_id kind source gpu n_gpus nodes gpus_per_node interconnect collective dtype bytes time_us algbw_gbs "
        "busbw_gbs algo variant trust notes"
    )
    gemm = "row_id kind source gpu dtype op M N K shape tflops peak_tflops pct_peak time_ms trust notes"
    texts = {"memory.csv": memory, "collectives.csv": collective, "gemm.csv": gemm}
    return texts.get(name, run).split()


def write(folder: Path, name: str, rows: list[dict[str, str]], more: tuple[str, ...] = ()) -> None:
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*columns(name), *more], restval="", extrasaction="ignore")
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow({"row_id": f"R{number}", **row})


def of(rows: list[PricedRow], name: str) -> list[PricedRow]:
    return [row for row in rows if row.file == name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, row in FILES.items():
        write(tmp_path, name, [row])
    return tmp_path


def test_every_file_is_priced(folder: Path) -> None:
    rows = accuracy.price(folder)
    for name, quantities in QUANTITIES.items():
        found = of(rows, name)
        assert [row.quantity for row in found] == quantities
        assert found[0].left_out is None
        assert found[0].predicted is not None
        assert 0.3 < found[0].predicted / found[0].measured < 3  # the invented figures are of the right size
        assert found[0].split == "validation"


def test_published_peaks_are_listed_with_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "memory.csv", [MEMORY])
    ((peak,), left_out) = published_memory.peaks(tmp_path)
    assert left_out == {}
    exact, low = f"{peak.priced:.6f}", f"{peak.priced / 0.91:.6f}"
    cases = [{**MEMORY, "value_gib": exact}, {**MEMORY, "value_gib": low}, {**MEMORY, "layers": ""}]
    write(tmp_path, "memory.csv", [*cases, {**MEMORY, "trust": "B"}])
    assert published_memory.main(["--truth", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["R1", "R0"], "the most underpriced first"
    assert "-9.0%" in lines[1]
    assert [line.endswith("yes") or "yes, above kept" in line for line in lines[1:3]] == [True, False]
    assert any(line.startswith("left out: R2: dimensions not stated: layers") for line in lines)
    assert "under by more than 8% of the measured peak: 1 (R1)" in lines
    write(tmp_path, "memory.csv", cases[:1])
    assert published_memory.main(["--truth", str(tmp_path)]) == 0


def test_a_sweep_of_the_cluster_prices_the_size_that_was_left_out(tmp_path: Path) -> None:
    sizes = [2**power for power in range(20, 30)]
    write(tmp_path, "collectives.csv", [{**COLLECTIVE, "bytes": str(n), "time_us": str(20 + n / 250e3)} for n in sizes])
    swept = of(accuracy.price(tmp_path), "collectives.csv")[len(sizes) :]
    inside = [row for row in swept if 7 in row.checks]
    assert len(inside) == len(sizes) - 2
    assert all(abs(row.error) < 0.1 for row in inside)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_with_one_file_alone_works(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, name, [FILES[name]])
    rows = accuracy.price(tmp_path)
    assert {row.file for row in rows} == {name}
    assert name in accuracy.text(rows)
    assert list(accuracy.summary(rows)["files"]) == [f"{name} {QUANTITIES[name][0]}"]


def test_an_empty_folder_has_no_rows(tmp_path: Path) -> None:
    assert accuracy.price(tmp_path) == []
    assert "assumed" in accuracy.text([])


@pytest.mark.parametrize("name", FILES)
def test_blank_cells_leave_a_row_out_with_a_reason(tmp_path: Path, name: str) -> None:
    row = FILES[name]
    blanks = [{**row, column: ""} for column in row] + [{"row_id": "R-blank"}]
    write(tmp_path, name, blanks)
    for priced in accuracy.price(tmp_path):
        assert (priced.predicted is None) == bool(priced.left_out), priced
        if priced.predicted is not None:
            assert priced.predicted > 0


@pytest.mark.parametrize("name", FILES)
def test_text_where_a_number_belongs_leaves_a_row_out_or_counts_as_blank(tmp_path: Path, name: str) -> None:
    row = FILES[name]
    write(tmp_path, name, [{**row, column: "?"} for column in row])
    assert all((priced.predicted is None) == bool(priced.left_out) for priced in accuracy.price(tmp_path))


def test_unknown_columns_and_short_lines_do_not_matter(tmp_path: Path) -> None:
    write(tmp_path, "training_runs.csv", [{**RUN, "new": "7"}], more=("new",))
    with (tmp_path / "training_runs.csv").open("a", encoding="utf-8") as file:
        file.write("R1,a short line\n")
        file.write(",".join(["R2", *["a long line"] * 80]) + "\n")
    first, *others = accuracy.price(tmp_path)
    assert first.predicted is not None
    assert [row.left_out is None for row in others] == [False, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": "hybrid-moe"}, "decoder layers"),
        ({"gpu": "Abacus"}, "catalogue"),
        ({"framework": "Abacus"}, "framework"),
        ({"layers": ""}, "layers"),
        ({"n_gpus": ""}, "devices"),
        ({"tp": "3"}, "no multiple"),
        ({"framework": "Megatron-Core", "mbs": ""}, "micro-batch"),
        ({"gbs": "4"}, "less than"),
        ({"step_time_s": "", "tokens_per_s_per_gpu": ""}, "measured"),
        ({"pp": "64", "n_gpus": "64", "gbs": "", "fsdp": ""}, "more than"),
        ({"model": "DeepSeek-V9"}, "latent attention"),
        ({"notes": "batch size may have been changed: verify before relying"}, "doubt"),
    ],
)
def test_runs_are_left_out_for_the_reason_that_applies(change: dict[str, str], reason: str) -> None:
    row = dict.fromkeys(columns("training_runs.csv"), "") | RUN | {"row_id": "R0"} | change
    priced = runs.price_row("training_runs.csv", row)
    assert priced.predicted is None
    assert reason in (priced.left_out or "")


@pytest.mark.parametrize(
    "change", [{"kind": "formula"}, {"value_gib": ""}, {"quantity": "bytes after the start"}, {"gpu": ""}]
)
def test_memory_is_left_out_where_nothing_was_measured(tmp_path: Path, change: dict[str, str]) -> None:
    write(tmp_path, "memory.csv", [{**MEMORY, **change}])
    (row,) = accuracy.price(tmp_path)
    assert row.left_out


def test_gigabytes_as_printed_are_those_of_the_framework(tmp_path: Path) -> None:
    printed = {**MEMORY, "mem_stat": "GB as printed"}
    write(tmp_path, "memory.csv", [{**printed, "framework": "Megatron-Bridge"}, printed])
    decimal, binary = accuracy.price(tmp_path)
    assert decimal.measured == pytest.approx(50e9 / 2**30)
    assert binary.measured == 50


def test_seconds_come_from_tokens_or_flops_where_no_time_is_stated(tmp_path: Path) -> None:
    blank = {**RUN, "step_time_s": ""}
    tokens = {**blank, "tokens_per_s_per_gpu": "4096"}
    flops = {**blank, "tflops_per_gpu": "100", "flop_convention": "causal attention"}
    write(tmp_path, "training_runs.csv", [tokens, flops])
    by_tokens, by_flops = accuracy.price(tmp_path)
    assert by_tokens.measured == pytest.approx(2.0)
    assert 3 < by_flops.measured < 5  # 6 x 8e9 parameters x 8192 tokens at 100 TFLOP/s, and attention


def test_rows_file_has_one_line_per_row_and_quantity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "rows.out.csv"
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--truth", str(folder), "--rows", str(out), "--json"])
    assert accuracy.main() == 0
    with out.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["file"] for line in lines] == [name for name in QUANTITIES for _ in QUANTITIES[name]]
    assert all(bool(line["predicted"]) != bool(line["left_out"]) for line in lines)


def test_json_has_checks_and_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--truth", str(folder), "--json"])
    accuracy.main()
    printed = json.loads(capsys.readouterr().out)
    assert {check["check"] for check in printed["checks"]} >= {1, 4, 6}
    assert set(printed["files"]) == {f"{name} {QUANTITIES[name][0]}" for name in FILES}


def test_checks_hold_or_miss_by_their_figures() -> None:
    check = next(check for check in CHECKS if check.number == 4)

    def row(predicted: float | None) -> PricedRow:
        return PricedRow(
            file="memory.csv", row_id="R", quantity="peak_mem_gib", source=INVENTED, measured=100.0,
            predicted=predicted, left_out=None if predicted else "why", checks=(4,),
        )  # fmt: skip

    assert holds(check, figures([row(105.0), row(92.0)]))
    assert not holds(check, figures([row(120.0)]))
    assert not holds(check, figures([row(100.0), row(100.0), row(85.0)]))  # one under by more than 10 %
    assert not holds(check, figures([row(None)]))


@pytest.mark.parametrize("framework", [name for name, _ in TABLE])
def test_every_framework_of_the_table_prices_a_run(framework: str) -> None:
    row = dict.fromkeys(columns("training_runs.csv"), "") | RUN | {"row_id": "R0", "framework": framework}
    priced = runs.price_row("training_runs.csv", row)
    assert priced.left_out is None
    assert priced.assumed[0]


def test_rows_that_their_logs_contradict_are_read_as_the_logs_say(tmp_path: Path) -> None:
    stated = {**RUN, "act_ckpt": "selective (op)", "compile": "loss only"}
    source = "pytorch/torchtitan commit f738a03bf message (#1610 DSV3 flex)"
    write(tmp_path, "training_runs.csv", [stated, {**stated, "source": source}])
    usual, corrected = read(tmp_path, "training_runs.csv")
    assert (usual["act_ckpt"], usual["compile"]) == ("selective (op)", "loss only")
    assert (corrected["act_ckpt"], corrected["compile"]) == ("full", "")
