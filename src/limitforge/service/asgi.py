"""Door two: the same calls as plain ASGI, for any server; and the way to everything else."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from limitforge.catalog.model import KeyScope
from limitforge.core.headers import fields_of
from limitforge.errors import InvalidInput, LimitforgeError
from limitforge.service.answers import Answer, refused
from limitforge.service.calls import Calls
from limitforge.service.check import MAX_BATCH_BODY, MAX_BODY, Checks
from limitforge.service.credentials import Who, key_of, presented
from limitforge.service.health import Health
from limitforge.service.problems import BadRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Handle = Callable[[Scope, Receive], Awaitable[Answer]]

MAX_QUERY = 8_192


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class DoorTwo:
    """Answers what takes an API key, health and metrics; whatever else there is goes to `other`."""

    def __init__(
        self, checks: Checks, calls: Calls, health: Health, metrics: Handle, root_path: str, other: App
    ) -> None:
        self._checks = checks
        self._calls = calls
        self._root_path = root_path
        self._other = other
        self._routes: dict[str, tuple[str, str, Handle]] = {
            "/v1/check": ("POST", "check", self._check),
            "/v1/check/batch": ("POST", "batch", self._batch),
            "/v1/usage": ("GET", "usage", self._usage),
            "/v1/health": ("GET", "health", health.live),
            "/v1/ready": ("GET", "ready", health.ready),
            "/metrics": ("GET", "metrics", metrics),
        }
        for call in calls.posts:
            self._routes[f"/v1/{call}"] = ("POST", call, self._post)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._path(scope)
        route = None if path is None or scope["type"] != "http" else self._routes.get(path)
        if route is None:
            await self._other(scope, receive, self._counted(send))
            return
        method, call, handle = route
        try:
            answer = await self._answer(scope, receive, method, handle)
        except ClientLeft:
            return
        self._checks.answered(call, answer.status)
        await send_answer(send, answer)

    def _counted(self, send: Send) -> Send:
        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._checks.answered("other", message["status"])
            await send(message)

        return counted

    async def _answer(self, scope: Scope, receive: Receive, method: str, handle: Handle) -> Answer:
        allowed = {"GET": ("GET", "HEAD"), "POST": ("POST",)}[method]
        if scope["method"] not in allowed:
            wrong = BadRequest(405, "method_not_allowed", f"this path takes {method}", allow=", ".join(allowed))
            return refused(wrong)
        try:
            return await handle(scope, receive)
        except LimitforgeError as error:
            return refused(error)

    def _path(self, scope: Scope) -> str | None:
        path: str = scope.get("path", "")
        if b"%2f" in scope.get("raw_path", b"").lower():  # which is no slash
            return None
        return path[len(self._root_path) :] if path.startswith(self._root_path) else None

    # --- Calls -------------------------------------------------------------------------------------------------------

    async def _check(self, scope: Scope, receive: Receive) -> Answer:
        return await _told(self._checks.submit, *await self._issued(scope, receive, MAX_BODY))

    async def _batch(self, scope: Scope, receive: Receive) -> Answer:
        return await _told(self._checks.submit_batch, *await self._issued(scope, receive, MAX_BATCH_BODY))

    async def _issued(self, scope: Scope, receive: Receive, limit: int) -> tuple[Who, bytes]:
        """Return who asks and the body, which is read only if the key may have been issued."""
        who = _who(scope, limit)
        unknown = None if self._checks.is_known(who) else self._checks.objection(who)
        if unknown is not None:
            raise unknown
        return who, await _read(receive, limit)

    async def _post(self, scope: Scope, receive: Receive) -> Answer:
        path = self._path(scope) or ""
        permission, call = self._calls.posts[path.removeprefix("/v1/")]
        caller = await self._checks.caller(_who(scope, MAX_BODY), permission)  # before a stranger's body is read
        return await self._calls.answer(call, caller, await _read(receive, MAX_BODY))

    async def _usage(self, scope: Scope, receive: Receive) -> Answer:
        who = Who.of(key_of(scope["headers"]), source_of(scope))
        caller = await self._checks.caller(who, KeyScope.USAGE)
        return await self._calls.usage(caller, _query(scope))


async def _told(submit: Callable[..., None], *asked: Any) -> Answer:
    """The answer of a call that tells it."""
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    submit(*asked, lambda answer: None if answered.done() else answered.set_result(answer))
    return await answered


def _who(scope: Scope, limit: int) -> Who:
    return Who.of(presented(scope["headers"], limit), source_of(scope))


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientLeft
        body += event.get("body", b"")
        if len(body) > limit:
            raise BadRequest(413, "body_too_large", f"at most {limit} bytes", connection="close")
        if not event.get("more_body", False):
            return bytes(body)


def _query(scope: Scope) -> dict[str, str]:
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


def source_of(scope: Scope) -> str:
    client = scope.get("client")
    return "" if client is None else str(client[0])


async def send_answer(send: Send, answer: Answer) -> None:
    headers = [
        (b"content-type", answer.content_type),
        *fields_of(answer.headers),
        (b"content-length", b"%d" % len(answer.body)),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
