"""Door two: the same calls as plain ASGI, for any server; and the way to everything else."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from limitforge.catalog.model import KeyScope
from limitforge.core.headers import parse_block
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.service.checks.handler import MAX_BATCH_BODY, MAX_BODY, CheckHandler
from limitforge.service.checks.request_credentials import Credentials, read_api_key, read_api_key_without_body
from limitforge.service.checks.responses import Response, problem_response
from limitforge.service.checks.tenant_api import TenantApi
from limitforge.service.http.health import Health
from limitforge.service.problems import HttpError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[Scope, Receive], Awaitable[Response]]

MAX_QUERY = 8_192


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


class AsgiRouter:
    """Answers what takes an API key, health and metrics; whatever else there is goes to `other`."""

    def __init__(
        self, checks: CheckHandler, calls: TenantApi, health: Health, metrics: Handler, root_path: str, other: ASGIApp
    ) -> None:
        self._checks = checks
        self._tenant_api = calls
        self._root_path = root_path
        self._fallback_app = other
        self._routes: dict[str, tuple[str, str, Handler]] = {
            "/v1/check": ("POST", "check", self._check),
            "/v1/check/batch": ("POST", "batch", self._batch),
            "/v1/usage": ("GET", "usage", self._usage),
            "/v1/health": ("GET", "health", health.live),
            "/v1/ready": ("GET", "ready", health.ready),
            "/metrics": ("GET", "metrics", metrics),
        }
        for call in calls.post_calls:
            self._routes[f"/v1/{call}"] = ("POST", call, self._post_call)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._path(scope)
        route = None if path is None or scope["type"] != "http" else self._routes.get(path)
        if route is None:
            await self._fallback_app(scope, receive, self._count_statuses(send))
            return
        method, call, handle = route
        try:
            answer = await self._respond(scope, receive, method, handle)
        except ClientDisconnected:
            return
        self._checks.count_response(call, answer.status)
        await send_response(send, answer)

    def _count_statuses(self, send: Send) -> Send:
        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._checks.count_response("other", message["status"])
            await send(message)

        return counted

    async def _respond(self, scope: Scope, receive: Receive, method: str, handle: Handler) -> Response:
        allowed = {"GET": ("GET", "HEAD"), "POST": ("POST",)}[method]
        if scope["method"] not in allowed:
            wrong = HttpError(405, "method_not_allowed", f"this path takes {method}", allow=", ".join(allowed))
            return problem_response(wrong)
        try:
            return await handle(scope, receive)
        except LimitforgeError as error:
            return problem_response(error)

    def _path(self, scope: Scope) -> str | None:
        path: str = scope.get("path", "")
        if b"%2f" in scope.get("raw_path", b"").lower():  # which is no slash
            return None
        return path[len(self._root_path) :] if path.startswith(self._root_path) else None

    # --- Calls -------------------------------------------------------------------------------------------------------

    async def _check(self, scope: Scope, receive: Receive) -> Response:
        return await _wait_for_response(self._checks.submit, *await self._read_request(scope, receive, MAX_BODY))

    async def _batch(self, scope: Scope, receive: Receive) -> Response:
        return await _wait_for_response(
            self._checks.submit_batch, *await self._read_request(scope, receive, MAX_BATCH_BODY)
        )

    async def _read_request(self, scope: Scope, receive: Receive, limit: int) -> tuple[Credentials, bytes]:
        """Return who asks and the body, which is read only if the key may have been issued."""
        who = _credentials(scope, limit)
        unknown = None if self._checks.is_known(who) else self._checks.early_rejection(who)
        if unknown is not None:
            raise unknown
        return who, await _read_body(receive, limit)

    async def _post_call(self, scope: Scope, receive: Receive) -> Response:
        path = self._path(scope) or ""
        permission, call = self._tenant_api.post_calls[path.removeprefix("/v1/")]
        caller = await self._checks.authenticate(
            _credentials(scope, MAX_BODY), permission
        )  # before a stranger's body is read
        return await self._tenant_api.respond(call, caller, await _read_body(receive, MAX_BODY))

    async def _usage(self, scope: Scope, receive: Receive) -> Response:
        who = Credentials.from_key(read_api_key_without_body(scope["headers"]), source_address(scope))
        caller = await self._checks.authenticate(who, KeyScope.USAGE)
        return await self._tenant_api.usage(caller, _parse_query(scope))


async def _wait_for_response(submit: Callable[..., None], *asked: Any) -> Response:
    """The answer of a call that tells it."""
    answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    submit(*asked, lambda answer: None if answered.done() else answered.set_result(answer))
    return await answered


def _credentials(scope: Scope, limit: int) -> Credentials:
    return Credentials.from_key(read_api_key(scope["headers"], limit), source_address(scope))


async def _read_body(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientDisconnected
        body += event.get("body", b"")
        if len(body) > limit:
            raise HttpError(413, "body_too_large", f"at most {limit} bytes", connection="close")
        if not event.get("more_body", False):
            return bytes(body)


def _parse_query(scope: Scope) -> dict[str, str]:
    raw: bytes = scope.get("query_string", b"")
    if len(raw) > MAX_QUERY:
        raise InvalidInput("query", f"at most {MAX_QUERY} bytes")
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, strict_parsing=bool(raw), errors="strict")
    except ValueError:
        raise InvalidInput("query", "must be URL-encoded UTF-8, such as resource=GET:/orders&subject=user:42") from None
    query = dict(pairs)
    if len(query) < len(pairs):
        raise InvalidInput("query", "names a field twice")
    return query


def source_address(scope: Scope) -> str:
    client = scope.get("client")
    return "" if client is None else str(client[0])


async def send_response(send: Send, answer: Response) -> None:
    headers = [
        (b"content-type", answer.content_type),
        *parse_block(answer.headers),
        (b"content-length", b"%d" % len(answer.body)),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
