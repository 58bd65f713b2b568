"""Request bodies -> a flat dict: JSON objects, multipart and url-encoded forms. Knows no field's meaning."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile

from inference.serving.errors import ApiError

FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


async def read_body(request: Request) -> dict[str, Any]:
    """Fields of a body. Form values stay strings (an upload its file name), for the schema to convert."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind in FORMS:
        return await _form(request)
    if kind != "application/json":
        expected = ", ".join(("application/json", *FORMS))
        raise ApiError(f"content-type: got {kind!r}, expected one of: {expected}", status=415)
    raw = await request.body()
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(f"the body: got a JSON {type(data).__name__}, expected an object of fields")
    return data


async def _form(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    async with request.form() as form:
        for key, value in form.multi_items():
            name = key.partition("[")[0]  # `lora[name]` and `tags[]` belong to the fields `lora` and `tags`
            plain = name == key
            if not plain:
                fields.setdefault(name, {})[key] = value
            elif name in fields:
                raise ApiError(f"{name}: given twice", param=name)
            else:
                fields[name] = value.filename if isinstance(value, UploadFile) else value
    return fields
