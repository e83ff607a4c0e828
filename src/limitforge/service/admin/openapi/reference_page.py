"""`/openapi.json` and `/docs`: the reference, with its page's files from the package `fastapi-swagger`."""

import asyncio
import html
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from limitforge.service.admin.openapi.document import build_document

TITLE = "limitforge"
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
CACHE_ONE_DAY = "public, max-age=86400"
# The page's own styles are inline; nothing comes from elsewhere, and nobody may frame it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Addresses are relative, so that the page works under any prefix.
PAGE_HTML = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(TITLE)}: reference</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="reference"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START_SCRIPT = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  validatorUrl: null,
  defaultModelsExpandDepth: 0,
  presets: [SwaggerUIBundle.presets.apis],
});
"""


def add_reference_routes(app: FastAPI, root_path: str) -> None:
    """Both are made when they are first asked for, and kept."""
    made = _LazyContent()

    async def openapi(_: Request) -> Response:
        content = await made.get("openapi", lambda: msgspec.json.encode(build_document(app, root_path)))
        return Response(content, media_type="application/json")

    async def page(_: Request) -> Response:
        return _secured_response(PAGE_HTML, "text/html")

    async def start(_: Request) -> Response:
        return _secured_response(START_SCRIPT, "text/javascript", cache_control=CACHE_ONE_DAY)

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    app.add_route("/docs", page, include_in_schema=False)
    app.add_route("/docs/start.js", start, include_in_schema=False)
    for name, kind in ASSETS.items():
        app.add_route(f"/docs/{name}", _asset_handler(name, kind, made), include_in_schema=False)


def _asset_handler(name: str, kind: str, made: "_LazyContent") -> Any:
    async def asset(_: Request) -> Response:
        content = await made.get(name, files("fastapi_swagger.resources").joinpath(name).read_bytes)
        return _secured_response(content, kind, cache_control=CACHE_ONE_DAY)

    return asset


class _LazyContent:
    """Content by name, made once: many who ask at the same time wait for the first."""

    def __init__(self) -> None:
        self._content: dict[str, bytes] = {}
        self._lock = asyncio.Lock()

    async def get(self, name: str, make: Callable[[], bytes]) -> bytes:
        if name not in self._content:
            async with self._lock:
                if name not in self._content:
                    self._content[name] = await asyncio.to_thread(make)
        return self._content[name]


def _secured_response(content: str | bytes, kind: str, **headers: str) -> Response:
    guards = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(content, media_type=kind, headers=guards | named)
