"""The ASGI middleware around the admin app: the root path, and no caching of admin responses."""

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limitforge.service.admin.routing import PREFIX
from limitforge.service.checks.responses import problem_response
from limitforge.service.problems import HttpError


class AdminMiddleware:
    """Answers 404 outside the root path, and adds `Cache-Control: no-store` to the responses of `/v1/admin`."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path and not scope["path"].startswith(f"{self._root_path}/"):
            problem = problem_response(HttpError(404, "unknown_path", "there is nothing at this path"))
            response = Response(problem.body, problem.status, media_type=problem.content_type.decode())
            await response(scope, receive, send)
            return

        async def send_uncacheable(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"cache-control", b"no-store")]
            await send(message)

        is_admin = scope["path"].startswith(f"{self._root_path}{PREFIX}")
        await self._app({**scope, "root_path": self._root_path}, receive, send_uncacheable if is_admin else send)
