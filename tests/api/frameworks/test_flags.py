"""Flags in shell text: quoting, variables, arrays, comments, other programs' flags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.frameworks.configurations.flags import read_flags, read_variables


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("--a 1\n--b\n--c=x", [("--a", "1"), ("--b", None), ("--c", "x")]),
        ("--a 1 \\\n  --b \\\n  -1 --c", [("--a", "1"), ("--b", "-1"), ("--c", None)]),
        ("--a 1 # --b 2, it's off\n# --c 3\n--d 4", [("--a", "1"), ("--d", "4")]),
        ("ARGS=(\n  --a 1\n  --b 2 # two\n)\nMORE+=( --c )", [("--a", "1"), ("--b", "2"), ("--c", None)]),
        ("ARGS=\"\n  --a 1 \\\n  --b 'x y'\n\"", [("--a", "1"), ("--b", "x y")]),
        ("TP=4\nDP=$((TP * 2))\n--a $TP --b ${DP} --c ${PP:-3}", [("--a", "4"), ("--b", "8"), ("--c", "3")]),
        ("--a $TP --b", [("--a", "$TP"), ("--b", None)]),
        ("python x.py --a 1 ${MORE[@]} --b 2", [("--a", "1"), ("--b", "2")]),
        ("torchrun --nproc_per_node 8 --standalone x.py --a 1", [("--a", "1")]),
        ("torchrun --nnodes 2 -m some.module --a 1 | tee log", [("--a", "1")]),
        ("MODULE=m ./run_train.sh --x.y 2 > log.txt", [("--x.y", "2")]),
        ('srun --container-image=i bash -c "torchrun --nnodes 2 x.py --a 1"', [("--a", "1")]),
        ("PROFILE=(\n  nsys profile\n  --trace cuda\n)\nA=(\n  --b\n  --c 1\n)", [("--b", None), ("--c", "1")]),
        ('case "$1" in\n  --help) usage ;;\n  --x)\n    X=1 ;;\nesac\n--y 1', [("--y", "1")]),
        ("docker run --gpus all image\nmkdir -p logs", []),
        ("vllm serve org/model -tp 8 --swap-space 4", [("-tp", "8"), ("--swap-space", "4")]),
        ("""--json '{"a b": 1}' --data one two""", [("--json", '{"a b": 1}'), ("--data", "one two")]),
        ("if [ $X = fp8 ]; then A+=(--fp8-format hybrid); fi", [("--fp8-format", "hybrid")]),
        ("--a 1; --b 2 && --c 3", [("--a", "1"), ("--b", "2"), ("--c", "3")]),
        ("--a=1\r\n--b 2\r\n", [("--a", "1"), ("--b", "2")]),
        ("--a 'unbalanced\n--b 2", [("--a", "'unbalanced"), ("--b", "2")]),
    ],
)
def test_flags_of_a_text(text: str, flags: list[tuple[str, str | None]]) -> None:
    assert read_flags(text) == flags


def test_variables_are_those_that_a_text_assigns() -> None:
    text = "export A=1\nB=${A}2 ./run_train.sh --x 1\nC=${3:-last}\nARGS=(--y 2)"
    assert read_variables(text) == {"A": "1", "B": "12", "C": "last", "ARGS": ""}


@given(st.text(alphabet="ab1-=$(){}[]\"'\\#|;&<> \n", max_size=60))
def test_no_text_fails(text: str) -> None:
    for key, value in read_flags(text):
        assert key.startswith("-")
        assert value is None or isinstance(value, str)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"--[a-z][a-z0-9\-.]{0,12}", fullmatch=True),
            st.none() | st.from_regex(r"[a-z0-9][a-z0-9_.,/:]{0,9}", fullmatch=True).filter(lambda v: "=" not in v),
        ),
        max_size=6,
    ),
    st.sampled_from([" ", " \\\n  "]),
)
def test_a_written_command_is_read_as_written(pairs: list[tuple[str, str | None]], blank: str) -> None:
    words = [word for key, value in pairs for word in ([key] if value is None else [key, value])]
    flags = read_flags(blank.join(["torchrun --nnodes 2 train.py", *words]))
    if not any(value and value.endswith((".py", ".sh")) for _, value in pairs):
        assert flags == pairs
