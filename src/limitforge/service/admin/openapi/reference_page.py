"""`/openapi.json` and `/docs`: the OpenAPI document, and Swagger UI with files from the package `fastapi-swagger`."""

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
# Swagger UI needs inline styles. Everything else comes from this origin, and no other page may frame this one.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# URLs are relative, so that the page works under any root path.
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
    """Add the routes of the document and the page. The document and the files are loaded at the first request."""
    content = _LazyContent()

    async def openapi(_: Request) -> Response:
        document = await content.get("openapi", lambda: msgspec.json.encode(build_document(app, root_path)))
        return Response(document, media_type="application/json")

    async def page(_: Request) -> Response:
        return _secured_response(PAGE_HTML, "text/html")

    async def start(_: Request) -> Response:
        return _secured_response(START_SCRIPT, "text/javascript", cache_control=CACHE_ONE_DAY)

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    app.add_route("/docs", page, include_in_schema=False)
    app.add_route("/docs/start.js", start, include_in_schema=False)
    for name, media_type in ASSETS.items():
        app.add_route(f"/docs/{name}", _asset_handler(name, media_type, content), include_in_schema=False)


def _asset_handler(name: str, media_type: str, content: "_LazyContent") -> Any:
    async def asset(_: Request) -> Response:
        body = await content.get(name, files("fastapi_swagger.resources").joinpath(name).read_bytes)
        return _secured_response(body, media_type, cache_control=CACHE_ONE_DAY)

    return asset


class _LazyContent:
    """Content by name, built once, in a thread. Concurrent requests wait for the first one."""

    def __init__(self) -> None:
        self._content: dict[str, bytes] = {}
        self._lock = asyncio.Lock()

    async def get(self, name: str, build: Callable[[], bytes]) -> bytes:
        if name not in self._content:
            async with self._lock:
                if name not in self._content:
                    self._content[name] = await asyncio.to_thread(build)
        return self._content[name]


def _secured_response(content: str | bytes, media_type: str, *, cache_control: str | None = None) -> Response:
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    if cache_control is not None:
        headers["cache-control"] = cache_control
    return Response(content, media_type=media_type, headers=headers)
