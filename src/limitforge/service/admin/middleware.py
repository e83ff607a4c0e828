"""The ASGI middleware around the admin app: the root path, and no caching of admin responses."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limitforge.service.admin.responses import error_response
from limitforge.service.admin.routing import PREFIX
from limitforge.service.problems import NOTHING_AT_PATH, HttpError


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
            response = error_response(HttpError(404, "unknown_path", NOTHING_AT_PATH))
            await response(scope, receive, send)
            return

        async def send_uncacheable(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"cache-control", b"no-store")]
            await send(message)

        is_admin = scope["path"].startswith(f"{self._root_path}{PREFIX}")
        await self._app({**scope, "root_path": self._root_path}, receive, send_uncacheable if is_admin else send)
