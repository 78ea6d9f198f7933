"""The files of the page in ``api/static``, and the content security policies that they are sent with."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

STATIC = Path(__file__).parents[1] / "static"

_INLINE_SCRIPT = re.compile(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>(.*?)</script>", re.DOTALL)
_IMPORT = re.compile(r"""(?:from|import)\s*\(?\s*["'](shardplan/[\w./]+|echarts|dagre)["']""")
_VENDORED = {"echarts": "vendor/echarts.js", "dagre": "vendor/dagre.js"}


def read(name: str) -> str:
    """Return the text of a file, by its path under ``api/static``."""
    return (STATIC / name).read_text(encoding="utf-8")


def content_security_policy(html: str, *, offline: bool = False) -> str:
    """Return the policy of a page: its own inline scripts, by their hashes, and files of the same server.

    Args:
        html: the page.
        offline: whether the page is a file of its own, whose modules are data: URLs and that asks no server.
    """
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in _INLINE_SCRIPT.findall(html))
    if offline:
        return f"default-src 'none'; script-src {scripts} data:; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        f"default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: "
        "blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def modules_of(entry: str) -> dict[str, str]:
    """Return bare name -> path under ``api/static`` of ``entry`` and of every module that it imports."""
    modules: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in modules:
            modules[name] = _VENDORED.get(name) or f"js/{name.removeprefix('shardplan/')}"
            if name not in _VENDORED:
                waiting += _IMPORT.findall(read(modules[name]))
    return modules
