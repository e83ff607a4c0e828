"""Exception handlers that turn every error of the admin app into a problem document (RFC 9457)."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.types import Scope

from limitforge.core.exact import short_repr
from limitforge.errors import InvalidInput, LimitforgeError, NotFound
from limitforge.observability.events import log_event
from limitforge.service.admin.responses import error_response
from limitforge.service.problems import NOTHING_AT_PATH, HttpError

_log = logging.getLogger(__name__)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with a problem document."""

    async def handle_error(_: Request, error: Exception) -> Response:
        return _log_and_respond(error)

    async def handle_validation(_: Request, error: Exception) -> Response:
        errors = error.errors() if isinstance(error, RequestValidationError) else ()
        return _log_and_respond(validation_error(errors))

    async def handle_routing(request: Request, error: Exception) -> Response:
        return _log_and_respond(_routing_error(app, request, error))

    app.add_exception_handler(LimitforgeError, handle_error)
    app.add_exception_handler(RequestValidationError, handle_validation)
    app.add_exception_handler(HTTPException, handle_routing)
    app.add_exception_handler(Exception, handle_error)


def _log_and_respond(error: Exception) -> Response:
    known = error if isinstance(error, LimitforgeError) else LimitforgeError("unexpected")
    response = error_response(known)
    if response.status_code == 500 and known is error:  # Starlette raises other exceptions again: the server logs them
        log_event(_log, logging.ERROR, "admin.request_failed", "an admin request failed", exc_info=error)
    return response


# --- Validation errors -----------------------------------------------------------------------------------------------


def validation_error(errors: Sequence[Any]) -> LimitforgeError:
    """Translate the first error of pydantic into an `InvalidInput` with the wording of the catalog."""
    first = errors[0] if errors else {"loc": (), "type": "", "msg": "is invalid"}
    location, *path = first["loc"] or ("body",)
    if location == "path":
        return NotFound("the id in the path is not valid")
    field = _field_path(path) or str(location)
    return InvalidInput(field.lower() if location == "header" else field, _describe_error(first))


def _field_path(path: Sequence[str | int]) -> str:
    field = ""
    for part in path:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    return field[:64]


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
    error_type, context = error["type"], error.get("ctx", {})
    if error_type == "missing":
        return "is required"
    if error_type == "extra_forbidden":
        return "unknown field"
    if error_type in ("enum", "literal_error"):
        return f"must be {context['expected']}, got {short_repr(error.get('input'))}"
    if error_type in _MUST_BE:
        return f"must be {_MUST_BE[error_type]}, got {short_repr(error.get('input'))}"
    message = str(error["msg"])
    return message.replace("Input should be", "must be").replace("String should", "must").strip()


# --- Routing errors --------------------------------------------------------------------------------------------------


def _routing_error(app: FastAPI, request: Request, error: Exception) -> LimitforgeError:
    status = getattr(error, "status_code", 500)
    if status == 405:
        allowed = ", ".join(sorted(set(_allowed_methods(app, request.scope))))
        return HttpError(405, "method_not_allowed", f"this path accepts {allowed}", allow=allowed)
    if status == 404:
        return HttpError(404, "unknown_path", NOTHING_AT_PATH)
    return HttpError(400, "malformed_request", "the request can't be read")


def _allowed_methods(app: FastAPI, scope: Scope) -> Iterator[str]:
    """Yield the methods that a path accepts. Each of them is a route of its own."""
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    for context in iter_route_contexts(app.routes):
        regex = getattr(context, "path_regex", None)
        if regex is not None and regex.match(path) and context.methods:
            yield from context.methods
