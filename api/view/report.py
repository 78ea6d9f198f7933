"""`report_html`: a plan as one self-contained HTML file, which shows what the page shows and asks no server."""

from __future__ import annotations

import base64
import html
import json

from api.view.plan_view import plan_view
from api.view.static_files import content_security_policy, modules_of, read
from planner.plan.sharding_plan import ShardingPlan

_ENTRY = "shardplan/report.js"
_STYLES = ("css/page.css", "css/print.css")


def report_html(plan: ShardingPlan) -> str:
    """Return the report of ``plan``: the page's own modules, with the plan inside. It opens from a file:// address."""
    view = plan_view(plan)
    imports = {name: _data_url(read(path)) for name, path in sorted(modules_of(_ENTRY).items())}
    document = _TEMPLATE.format(
        title=html.escape(view["title"]),
        styles="\n".join(read(path) for path in _STYLES),
        import_map=json.dumps({"imports": imports}),
        view=_safe(json.dumps(view, separators=(",", ":"))),
        entry=_ENTRY,
        policy="{policy}",
    )
    return document.replace("{policy}", html.escape(content_security_policy(document, offline=True)), 1)


def _data_url(text: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def _safe(text: str) -> str:
    """Return JSON that cannot end the script element that it lies in, whatever its strings are."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{styles}
</style>
<script type="importmap">{import_map}</script>
<script type="application/json" id="view">{view}</script>
<script type="module">import "{entry}";</script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<main id="main" tabindex="-1"></main>
</body>
</html>
"""
