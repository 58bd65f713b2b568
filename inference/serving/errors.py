"""Errors on the wire: ``{"error": {message, type, param, code}}`` for every failure; a request id on every reply."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cards.errors import UserError

log = logging.getLogger("fastvideo.serve")
REQUEST_ID = "x-request-id"
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ApiError(Exception):
    """A reply that is an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers) if headers is not None else {}

    def response(self) -> JSONResponse:
        body = error_body(self.message, status=self.status, param=self.param, code=self.code)
        return JSONResponse(body, self.status, headers=self.headers)


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body that OpenAI's clients read."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_handlers(app: FastAPI) -> None:
    """Turns every kind of exception that a route or the framework raises into the one body."""

    async def on_api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_user_error(request: Request, error: Exception) -> JSONResponse:
        return ApiError(str(error)).response()

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        rows = error.errors()
        message = "; ".join(f"{row['loc'][-1]}: {row['msg']}" for row in rows)
        return ApiError(message, param=str(rows[0]["loc"][-1])).response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(message, status=error.status_code, headers=error.headers).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(UserError, on_user_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


class Envelope:
    """Around every route: a request id on the reply, a bound on the body, and a clean 500 for a bug."""

    def __init__(self, app: ASGIApp, max_body_bytes: int):
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _CLIENT_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        started = False
        received = 0

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise ApiError(
                    f"the body is larger than {self.max_body_bytes} bytes, the most that this server takes",
                    status=413,
                    code="body_too_large",
                )
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self.app(scope, bounded_receive, send_with_id)
        except Exception:
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if started:
                raise
            message = f"the server failed on this request; its log has the details under {request_id}"
            await ApiError(message, status=500, code="internal_error").response()(scope, receive, send_with_id)
