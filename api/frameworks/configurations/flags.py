"""`read_flags`: the command-line flags in a text: a shell script, a command, a bash array, or one flag per line."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator

TORCHRUN_FLAG = re.compile(
    r"--(nproc.per.node|nnodes|node.rank|master.addr|master.port|local.addr|standalone|rdzv.\w+|max.restarts|role|tee"
    r"|monitor.interval|start.method|log.dir|redirects|run.path|no.python|module|local.ranks.filter|virtual.local.rank"
    r"|event.log.handler|duplicate.\w+.filters|signals.to.handle)"
)
"""A flag of torchrun, of which texts that `read_flags` reads may have some in bash arrays."""

OTHER_PROGRAM = re.compile(
    r"apptainer|cd|cp|curl|docker|echo|enroot|export|find|git|grep|hf|huggingface-cli|local|ls|mkdir|mpirun|mv|numactl"
    r"|nsys|nvidia-smi|pip|printf|readonly|rm|sbatch|scontrol|sed|set|singularity|source|srun|test|time|uv|wget"
)
"""A program whose own flags say nothing of a configuration."""

_FLAG = re.compile(r"--?[A-Za-z][\w.\-]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_QUOTED_FLAGS = re.compile(r"(^|\s)--[A-Za-z]")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")
_SEPARATORS = ";|&()\n"
_BLANKS = " \t\r"
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

Flags = list[tuple[str, str | None]]


def read_flags(text: str) -> Flags:
    """Return the (flag, value) pairs of a text in their order; a flag that repeats is there as often.

    Keys are as written, with their dashes. Several values of a flag are joined by spaces. The value of a flag without
    one is None. Variables that the text assigns are replaced, ``${NAME:-default}`` by its default. Comments, flags of
    torchrun before its script and those of other programs are left out; torchrun's may be left in bash arrays
    (``TORCHRUN_FLAG``). Branches of a script are all read.
    """
    return _read(text, {})


def read_variables(text: str) -> dict[str, str]:
    """Return name -> value of the shell variables that a text assigns outside of arrays."""
    variables: dict[str, str] = {}
    _read(text, variables)
    return variables


def _read(text: str, variables: dict[str, str]) -> Flags:
    flags: Flags = []
    for command in _commands(text):
        words = [_expanded(word, variables) for word in command]
        assignments = [match for match in map(_ASSIGNMENT.fullmatch, words) if match]
        for match in assignments:
            if not _QUOTED_FLAGS.search(match[2]):
                variables[match[1]] = match[2]
        flags.extend(_flags_of(words, variables))
    return flags


def _flags_of(words: list[str], variables: dict[str, str]) -> Flags:
    """Return the flags of one command, among them those in its quoted words."""
    flags: Flags = []
    for word in _arguments(words):
        inner = word.partition("=")[2] if _ASSIGNMENT.fullmatch(word) else word
        flag = _FLAG.match(word)
        if _QUOTED_FLAGS.search(inner) and (not flag or any(blank in word.strip() for blank in " \n")):
            flags.extend(_read(inner, variables))
        elif flag and flag.end() == len(word):
            flags.append((word, None))
        elif flag and word[flag.end()] == "=":
            flags.append((flag[0], word[flag.end() + 1 :]))
        elif flags:
            key, value = flags[-1]
            if value is None:
                flags[-1] = (key, word)
            elif not word.startswith("$"):
                flags[-1] = (key, f"{value} {word}")
    return flags


def _arguments(words: list[str]) -> list[str]:
    """Return the words of a command after its program: after the last script, module or subcommand."""
    while words and words[0] in ("then", "do", "else", "exec", "sudo", "{"):
        words = words[1:]
    start = 0
    for place, word in enumerate(words):
        is_program = word.endswith((".py", ".sh")) and not (place and words[place - 1].startswith("--"))
        if (is_program and not word.startswith("-")) or (word == "serve" and place and words[place - 1] == "vllm"):
            start = max(start, place + 1)
        elif word == "-m" and start == 0:
            start = place + 2
        elif start == 0 and is_after_switch(words, place):
            start = place + 1
    program = next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
    if start == 0 and OTHER_PROGRAM.fullmatch(program):
        return [word for word in words if _ASSIGNMENT.fullmatch(word) or "torchrun" in word]
    return [word for word in words[:start] if _ASSIGNMENT.fullmatch(word)] + words[start:]


def is_after_switch(words: list[str], place: int) -> bool:
    """Return whether the word is a script that follows a flag of torchrun that takes no value."""
    return words[place].endswith(".py") and words[place - 1] in ("--standalone", "--no-python", "--no_python")


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; quotes and comments are removed, and quoted words stay whole."""
    words: list[str] = []
    word: str | None = None
    place, in_array = 0, False
    while place < len(text):
        char, end = text[place], place + 1
        if char == "\\" and end < len(text):
            end += 2 if text.startswith("\r\n", end) else 1
            if text[place + 1] not in "\r\n":
                word = (word or "") + text[place + 1]
            elif word is not None:
                words.append(word)
                word = None
        elif char in "\"'" and (close := _closing_quote(text, place)) > 0:
            word, end = (word or "") + text[place + 1 : close], close + 1
        elif char == "$" and text[end : end + 1] in ("{", "("):
            end = _closing_bracket(text, end)
            word = (word or "") + text[place:end]
        elif char == "#" and word is None:
            end = text.find("\n", place)
            end = len(text) if end < 0 else end
        elif char in _SEPARATORS or char in _BLANKS:
            starts_array = char == "(" and word is not None and word.endswith("=")
            if word is not None:
                words.append(word)
                word = None
            if char == ")" and not in_array and len(words) == 1:
                words = []  # a pattern of a case
            in_array = starts_array or (in_array and char != ")")
            if char in _SEPARATORS and words and not (in_array and char == "\n"):
                yield words
                words = []
        elif char in "<>":
            word, end = None, _after_redirection(text, place)
        else:
            word = (word or "") + char
        place = end
    if word is not None:
        words.append(word)
    if words:
        yield words


def _closing_quote(text: str, start: int) -> int:
    """Return where the quote that opens at ``start`` closes, -1 where it does not."""
    place = start + 1
    while (place := text.find(text[start], place)) >= 0:
        if text[start] == "'" or text[place - 1] != "\\":
            return place
        place += 1
    return -1


def _closing_bracket(text: str, start: int) -> int:
    """Return the place after the bracket that closes the one at ``start``; the end of the line where none does."""
    opening = text[start]
    closing, depth = {"{": "}", "(": ")"}[opening], 0
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if depth == 0:
            return place + 1
    line_end = text.find("\n", start)
    return len(text) if line_end < 0 else line_end


def _after_redirection(text: str, start: int) -> int:
    match = re.compile(r"[<>&]+[ \t]*[^\s;|()]*").match(text, start)
    return match.end() if match else start + 1


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Return a word with its variables and its integer arithmetic; what is not known stays as it is written."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables:
            return variables[name]
        return match[0] if default is None else default.strip("\"'")

    for _ in range(4):
        replaced = _VARIABLE.sub(value, word)
        if replaced == word:
            break
        word = replaced
    return re.sub(r"\$\(\((.*?)\)\)", lambda match: _arithmetic(match, variables), word)


def _arithmetic(match: re.Match[str], variables: dict[str, str]) -> str:
    named = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    try:
        return str(_evaluated(ast.parse(named.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return match[0]


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("not integer arithmetic")
