"""The ASGI app: all calls of the service for any ASGI server, and the way to the admin API."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from limitforge.catalog.model import KeyScope
from limitforge.core.headers import parse_block
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.service.checks.batches import BatchHandler
from limitforge.service.checks.body_sizes import MAX_BATCH_BODY_BYTES, MAX_BODY_BYTES
from limitforge.service.checks.handler import CheckHandler
from limitforge.service.checks.request_credentials import Credentials, read_api_key, read_api_key_without_body
from limitforge.service.checks.responses import Response, problem_response
from limitforge.service.checks.tenant_api import TenantApi
from limitforge.service.counters.process_counters import ProcessCounters
from limitforge.service.http.health import Health
from limitforge.service.http.pipelined_request import RequestHandler
from limitforge.service.problems import HttpError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler = Callable[[Scope, Receive], Awaitable[Response]]

MAX_QUERY_BYTES = 8_192


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


class AsgiRouter:
    """Answers all calls that take an API key, health and metrics. Any other request goes to `admin_app`."""

    def __init__(
        self,
        check_handler: CheckHandler,
        batch_handler: BatchHandler,
        tenant_api: TenantApi,
        counters: ProcessCounters,
        health: Health,
        metrics: Handler,
        root_path: str,
        admin_app: ASGIApp,
    ) -> None:
        self._check_handler = check_handler
        self._batch_handler = batch_handler
        self._authenticator = check_handler.authenticator
        self._tenant_api = tenant_api
        self._count_response = counters.count_response
        self._root_path = root_path
        self._admin_app = admin_app
        self._routes: dict[str, tuple[str, str, Handler]] = {
            "/v1/check": ("POST", "check", self._check),
            "/v1/check/batch": ("POST", "batch", self._batch),
            "/v1/usage": ("GET", "usage", self._usage),
            "/v1/health": ("GET", "health", health.live),
            "/v1/ready": ("GET", "ready", health.ready),
            "/metrics": ("GET", "metrics", metrics),
        }
        """By path: the method, the name in metrics, and the handler."""
        for name in tenant_api.post_calls:
            self._routes[f"/v1/{name}"] = ("POST", name, self._answer_post_call)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._path(scope)
        route = None if path is None or scope["type"] != "http" else self._routes.get(path)
        if route is None:
            await self._admin_app(scope, receive, self._count_statuses(send))
            return
        method, name, handler = route
        try:
            response = await self._respond(scope, receive, method, handler)
        except ClientDisconnected:
            return
        self._count_response(name, response.status)
        await send_response(send, response)

    def _count_statuses(self, send: Send) -> Send:
        async def send_counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._count_response("other", message["status"])
            await send(message)

        return send_counted

    async def _respond(self, scope: Scope, receive: Receive, method: str, handler: Handler) -> Response:
        allowed = {"GET": ("GET", "HEAD"), "POST": ("POST",)}[method]
        if scope["method"] not in allowed:
            error = HttpError(405, "method_not_allowed", f"this path accepts {method}", allow=", ".join(allowed))
            return problem_response(error)
        try:
            return await handler(scope, receive)
        except LimitforgeError as error:
            return problem_response(error)

    def _path(self, scope: Scope) -> str | None:
        path: str = scope.get("path", "")
        if b"%2f" in scope.get("raw_path", b"").lower():  # an encoded slash does not separate segments
            return None
        return path[len(self._root_path) :] if path.startswith(self._root_path) else None

    # --- Calls -------------------------------------------------------------------------------------------------------

    async def _check(self, scope: Scope, receive: Receive) -> Response:
        return await _wait_for_response(
            self._check_handler.handle, *await self._read_request(scope, receive, MAX_BODY_BYTES)
        )

    async def _batch(self, scope: Scope, receive: Receive) -> Response:
        return await _wait_for_response(
            self._batch_handler.handle, *await self._read_request(scope, receive, MAX_BATCH_BODY_BYTES)
        )

    async def _read_request(self, scope: Scope, receive: Receive, max_body_bytes: int) -> tuple[Credentials, bytes]:
        """Return the credentials and the body, which is received only if the key may have been issued."""
        credentials = _credentials(scope, max_body_bytes)
        self._authenticator.reject_unknown_key(credentials)
        return credentials, await _read_body(receive, max_body_bytes)

    async def _answer_post_call(self, scope: Scope, receive: Receive) -> Response:
        path = self._path(scope) or ""
        key_scope, call = self._tenant_api.post_calls[path.removeprefix("/v1/")]
        # These calls need the caller anyway, so the look-up comes before the body is received.
        caller = await self._authenticator.authenticate(_credentials(scope, MAX_BODY_BYTES), key_scope)
        return await self._tenant_api.respond(call, caller, await _read_body(receive, MAX_BODY_BYTES))

    async def _usage(self, scope: Scope, receive: Receive) -> Response:
        credentials = Credentials.from_key(read_api_key_without_body(scope["headers"]), read_client_ip(scope))
        caller = await self._authenticator.authenticate(credentials, KeyScope.USAGE)
        return await self._tenant_api.usage(caller, _parse_query(scope))


async def _wait_for_response(handle: RequestHandler, credentials: Credentials, body: bytes) -> Response:
    """Return the response that `handle` passes to its callback."""
    future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    handle(credentials, body, lambda response: None if future.done() else future.set_result(response))
    return await future


def _credentials(scope: Scope, max_body_bytes: int) -> Credentials:
    return Credentials.from_key(read_api_key(scope["headers"], max_body_bytes), read_client_ip(scope))


async def _read_body(receive: Receive, max_body_bytes: int) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientDisconnected
        body += event.get("body", b"")
        if len(body) > max_body_bytes:
            raise HttpError(413, "body_too_large", f"at most {max_body_bytes} bytes", connection="close")
        if not event.get("more_body", False):
            return bytes(body)


def _parse_query(scope: Scope) -> dict[str, str]:
    raw: bytes = scope.get("query_string", b"")
    if len(raw) > MAX_QUERY_BYTES:
        raise InvalidInput("query", f"at most {MAX_QUERY_BYTES} bytes")
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, strict_parsing=bool(raw), errors="strict")
    except ValueError:
        raise InvalidInput("query", "must be URL-encoded UTF-8, such as resource=GET:/orders&subject=user:42") from None
    query = dict(pairs)
    if len(query) < len(pairs):
        raise InvalidInput("query", "a parameter must not be repeated")
    return query


def read_client_ip(scope: Scope) -> str:
    """Return the IP address of the client, or an empty string if the server does not know it."""
    client = scope.get("client")
    return "" if client is None else str(client[0])


async def send_response(send: Send, response: Response) -> None:
    headers = [
        (b"content-type", response.content_type),
        *parse_block(response.headers),
        (b"content-length", b"%d" % len(response.body)),
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
