"""The route class of the admin API: authenticate the token, read and validate the body, call the handler."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute, APIRouter
from starlette.requests import ClientDisconnect

from limitforge.catalog.model import TokenScope
from limitforge.errors import InvalidInput
from limitforge.service.checks.body_sizes import MAX_BODY_BYTES
from limitforge.service.checks.request_bodies import reject_duplicate_names
from limitforge.service.checks.request_credentials import read_api_key
from limitforge.service.problems import HttpError

PREFIX = "/v1/admin"
MAX_DEPTH = 32
MAX_VALUES = 1_024  # the largest plan has half as many
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1  # the integers that msgspec can encode in a response

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class ParsedRequest(Request):
    """A request whose body has been read and decoded."""

    def __init__(self, request: Request, raw: bytes, decoded: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._decoded = decoded

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._decoded


class AdminRoute(APIRoute):
    """A route that authenticates the admin token before it reads the body."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def authenticate_and_handle(request: Request) -> Response:
            await request.app.state.authenticate(request)
            if request.method == "GET":
                raw, decoded = b"", None
            else:
                request.state.session.require_scope(TokenScope.WRITE)
                raw, decoded = await _read_body(request)
            request.state.decoded_body = decoded
            return await handle(ParsedRequest(request, raw, decoded))

        return authenticate_and_handle


def admin_router(path: str, tag: str) -> APIRouter:
    return APIRouter(prefix=f"{PREFIX}{path}", tags=[tag], route_class=AdminRoute)


async def _read_body(request: Request) -> tuple[bytes, Any]:
    """Return the body, raw and decoded. Refuse one that is too large, is not JSON, or has values out of bounds."""
    headers: list[tuple[bytes, bytes]] = request.scope["headers"]
    _validate_headers(headers, b"content-length")
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                raise HttpError(413, "body_too_large", f"at most {MAX_BODY_BYTES} bytes", connection="close")
    except ClientDisconnect:
        raise HttpError(400, "malformed_request", "the client disconnected before the end of the body") from None
    if not raw:
        return b"", None
    _validate_headers(headers, b"content-")
    try:
        decoded = msgspec.json.decode(raw)
        _validate_values(decoded)
        reject_duplicate_names(bytes(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HttpError(400, "malformed_json", str(error)) from None
    except RecursionError:
        raise HttpError(400, "malformed_json", f"nested deeper than {MAX_DEPTH}") from None
    return bytes(raw), decoded


def _validate_headers(headers: list[tuple[bytes, bytes]], prefix: bytes) -> None:
    """Refuse a body that is too large, compressed or not JSON, by the headers whose name starts with `prefix`.

    `read_api_key` also validates these headers, in the same loop for speed: each check passes through it. The key that
    it returns is not used.
    """
    read_api_key((header for header in headers if header[0].startswith(prefix)), MAX_BODY_BYTES)


def _validate_values(decoded: Any) -> None:
    """Refuse a body that is nested too deeply, or has too many values, or an integer that a response can't encode."""
    stack: list[tuple[str, Any, int]] = [("", decoded, 1)]
    count = 1
    while stack:
        path, value, depth = stack.pop()
        count += len(value) if isinstance(value, dict | list) else 0
        if count > MAX_VALUES:
            raise HttpError(400, "malformed_json", f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise HttpError(400, "malformed_json", f"nested deeper than {MAX_DEPTH}")
        path = path[:64]
        if isinstance(value, dict):
            stack += [(f"{path}.{name}" if path else name, member, depth + 1) for name, member in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{index}]", item, depth + 1) for index, item in enumerate(value)]
        elif isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
            raise InvalidInput(path[:64] or "body", "is a number out of range")
