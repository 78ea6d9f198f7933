"""``/``, ``/plans``, ``/devices`` and ``/docs``: the page, and the OpenAPI page. They ask no other host."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Response
from fastapi.staticfiles import StaticFiles

from api.view.static_files import STATIC, content_security_policy, read

router = APIRouter(include_in_schema=False)

_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/plans", methods=["GET", "HEAD"])
@router.api_route("/plans/{job_id}", methods=["GET", "HEAD"])
@router.api_route("/devices", methods=["GET", "HEAD"])
def page() -> Response:
    """Return the page. Its script shows what the address says, and asks for a token where the server wants one."""
    return _html("index.html")


@router.api_route("/docs", methods=["GET", "HEAD"])
def docs() -> Response:
    """Return the OpenAPI document as a page."""
    return _html("docs.html")


def _html(name: str) -> Response:
    text = read(name)
    policy = content_security_policy(text)
    return Response(text, media_type="text/html", headers={**_HEADERS, "Content-Security-Policy": policy})


class _Files(StaticFiles):
    """The page's files: a browser asks each time whether it has the newest."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers.update({"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"})
        return response


def add_static_files(app: FastAPI) -> None:
    """Serve the page's files under ``/static``."""
    app.mount("/static", _Files(directory=STATIC), name="static")
