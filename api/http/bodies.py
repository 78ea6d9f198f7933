"""Request bodies: parsed from JSON into their models, and described in the OpenAPI document."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from api.http.problems import MalformedBodyError

_Body = TypeVar("_Body", bound=BaseModel)
_REFERENCE = "#/components/schemas/{model}"
_BODY_S = 30.0
"""Seconds that a whole body may take to come; the largest has a megabyte."""


async def read_body(request: Request) -> bytes:
    """Return the body of a request whose content type is JSON.

    Raises:
        HTTPException: 415 for another type. An HTML form of another site cannot send JSON, so this prevents CSRF. 408
            where the body does not come in time.
        ClientDisconnect: the client left before all of it came.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "Send JSON, with the header Content-Type: application/json.")
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.body()
    except TimeoutError as error:
        detail = f"The body did not come within {_BODY_S:g} s."
        raise HTTPException(408, detail, headers={"Connection": "close"}) from error


def as_text(body: bytes) -> str:
    """Return ``body`` as a text for `read_text`, whatever its bytes are."""
    return body.decode(errors="surrogateescape")


def read_text(model: type[_Body], text: str) -> _Body:
    """Return a text of `as_text` as a ``model``; errors are those of `parse`."""
    return parse(model, text.encode(errors="surrogateescape"))


def parse(model: type[_Body], body: bytes) -> _Body:
    """Return ``body`` as a ``model``.

    Raises:
        MalformedBodyError: the body is no JSON document of this model, or nests too deep.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise MalformedBodyError(error) from error


def describes(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI entry of a route whose request body is a ``model``."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, *models: type[BaseModel]) -> None:
    """Add the schemas of ``models`` to the OpenAPI document; FastAPI adds only schemas of bodies that it parses."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        _, body_schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
        for name, schema in body_schemas.get("$defs", {}).items():
            schemas.setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
