"""What every admin call goes through before it is handled: its token, then its body. What goes wrong, wherever it does,
is answered as a problem document.
"""

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, APIRouter, iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limitforge.catalog.model import TokenScope
from limitforge.core.exact import short_repr
from limitforge.core.headers import parse_block
from limitforge.errors import InvalidInput, LimitforgeError, NotFound
from limitforge.service.checks.handler import MAX_BODY
from limitforge.service.checks.request_bodies import reject_duplicate_names
from limitforge.service.checks.request_credentials import read_api_key
from limitforge.service.checks.responses import problem_response
from limitforge.service.problems import HttpError

PREFIX = "/v1/admin"
MAX_DEPTH = 32
MAX_VALUES = 1_024  # of a body: a plan with all its limits has half of that
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1  # what a JSON number may be in the answers

_log = logging.getLogger(__name__)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class ParsedRequest(Request):
    """A request whose body was read already."""

    def __init__(self, request: Request, raw: bytes, plain: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._plain = plain

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._plain


class AdminRoute(APIRoute):
    """Nobody's body is read before their token is known to be right."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def admitted(request: Request) -> Response:
            await request.app.state.admit(request)
            if request.method == "GET":
                raw, plain = b"", None
            else:
                request.state.session.require(TokenScope.WRITE)
                raw, plain = await _read_body(request)
            request.state.plain = plain
            return await handle(ParsedRequest(request, raw, plain))

        return admitted


def admin_router(path: str, tag: str) -> APIRouter:
    return APIRouter(prefix=f"{PREFIX}{path}", tags=[tag], route_class=AdminRoute)


async def _read_body(request: Request) -> tuple[bytes, Any]:
    """The body, and what it says; refused where it is too large, or no JSON that we could answer with again."""
    headers: list[tuple[bytes, bytes]] = request.scope["headers"]
    read_api_key((each for each in headers if each[0] == b"content-length"), MAX_BODY)
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > MAX_BODY:
                raise HttpError(413, "body_too_large", f"at most {MAX_BODY} bytes", connection="close")
    except ClientDisconnect:
        raise HttpError(400, "malformed_request", "the body did not arrive") from None
    if not raw:
        return b"", None
    read_api_key((each for each in headers if each[0].startswith(b"content-")), MAX_BODY)
    try:
        plain = msgspec.json.decode(raw)
        _check_values(plain)
        reject_duplicate_names(bytes(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HttpError(400, "malformed_json", str(error)) from None
    except RecursionError:
        raise HttpError(400, "malformed_json", f"nested deeper than {MAX_DEPTH}") from None
    return bytes(raw), plain


def _check_values(plain: Any) -> None:
    """Refuse what is nested too deeply, has too many values, or a number that we could not answer with again."""
    waiting: list[tuple[str, Any, int]] = [("", plain, 1)]
    values = 1
    while waiting:
        path, value, depth = waiting.pop()
        values += len(value) if isinstance(value, dict | list) else 0
        if values > MAX_VALUES:
            raise HttpError(400, "malformed_json", f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise HttpError(400, "malformed_json", f"nested deeper than {MAX_DEPTH}")
        path = path[:64]
        if isinstance(value, dict):
            waiting += [(f"{path}.{name}" if path else name, each, depth + 1) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[{at}]", each, depth + 1) for at, each in enumerate(value)]
        elif isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
            raise InvalidInput(path[:64] or "body", "is a number out of range")


# --- Problems --------------------------------------------------------------------------------------------------------


def add_error_handlers(app: FastAPI) -> None:
    """Answer whatever goes wrong as problem documents."""

    async def of_ours(_: Request, error: Exception) -> Response:
        return _problem_response(error)

    async def of_validation(_: Request, error: Exception) -> Response:
        errors = error.errors() if isinstance(error, RequestValidationError) else ()
        return _problem_response(validation_problem(errors))

    async def of_routing(request: Request, error: Exception) -> Response:
        return _problem_response(_routing_problem(app, request, error))

    app.add_exception_handler(LimitforgeError, of_ours)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_routing)
    app.add_exception_handler(Exception, of_ours)


def _problem_response(error: Exception) -> Response:
    known = error if isinstance(error, LimitforgeError) else LimitforgeError("unexpected")
    answer = problem_response(known)
    if answer.status == 500 and known is error:  # whoever serves us logs the others
        _log.error("an admin call failed", exc_info=error)
    response = Response(answer.body, answer.status, media_type=answer.content_type.decode())
    response.raw_headers += parse_block(answer.headers)
    return response


def validation_problem(errors: Sequence[Any]) -> LimitforgeError:
    """The first that pydantic has to say, in our words."""
    first = errors[0] if errors else {"loc": (), "type": "", "msg": "is wrong"}
    place, *path = first["loc"] or ("body",)
    if place == "path":
        return NotFound("there is no such thing")
    named = _field_path(path) or str(place)
    return InvalidInput(named.lower() if place == "header" else named, _describe_error(first))


def _field_path(path: Sequence[str | int]) -> str:
    named = ""
    for part in path:
        named += f"[{part}]" if isinstance(part, int) else f".{part}" if named else str(part)
    return named[:64]


_MUST_BE = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "dict_type": "an object",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
}


def _describe_error(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "is not a field here"
    if kind in ("enum", "literal_error"):
        return f"must be {context['expected']}, got {short_repr(error.get('input'))}"
    if kind in _MUST_BE:
        return f"must be {_MUST_BE[kind]}, got {short_repr(error.get('input'))}"
    said = str(error["msg"])
    return said.replace("Input should be", "must be").replace("String should", "must").strip()


def _routing_problem(app: FastAPI, request: Request, error: Exception) -> LimitforgeError:
    status = getattr(error, "status_code", 500)
    if status == 405:
        allowed = ", ".join(sorted(set(_allowed_methods(app, request.scope))))
        return HttpError(405, "method_not_allowed", f"this path takes {allowed}", allow=allowed)
    if status == 404:
        return HttpError(404, "unknown_path", "there is nothing at this path")
    return HttpError(400, "malformed_request", "the request can't be read")


def _allowed_methods(app: FastAPI, scope: Scope) -> Iterator[str]:
    """All that a path takes: each of them is a route of its own."""
    for context in iter_route_contexts(app.routes):
        regex = getattr(context, "path_regex", None)
        if regex is not None and regex.match(_path(scope)) and context.methods:
            yield from context.methods


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


# --- Around all of it ------------------------------------------------------------------------------------------------


class RootPathMiddleware:
    """Holds to the root path: what does not start with it is nobody's here. What is administered is never stored on
    its way.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path and not scope["path"].startswith(f"{self._root_path}/"):
            nothing = problem_response(HttpError(404, "unknown_path", "there is nothing at this path"))
            response = Response(nothing.body, nothing.status, media_type=nothing.content_type.decode())
            await response(scope, receive, send)
            return

        async def unstored(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"cache-control", b"no-store")]
            await send(message)

        is_admin = scope["path"].startswith(f"{self._root_path}{PREFIX}")
        await self._app({**scope, "root_path": self._root_path}, receive, unstored if is_admin else send)
