"""Who may talk to the server: bearer keys in front of every route but the probes. Pure ASGI."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from core.server.responses import error_body, json_bytes
from metrics.prometheus import ServerMetrics

# Probes and scrapers of the same network carry no key, and these routes tell nothing of any request.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
GENERATING_ROUTES = ("/v1/chat/completions", "/v1/completions")


class RequireApiKey:
    """Answer 401 unless a request shows a known key. `digests` are SHA-256 of the keys, in hexadecimal."""

    def __init__(self, app: ASGIApp, *, digests: Sequence[str], metrics: ServerMetrics) -> None:
        self._app = app
        self._digests = [digest.encode() for digest in digests]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        shown = Headers(scope=scope).get("authorization", "")
        if self._knows(shown):
            await self._app(scope, receive, send)
            return
        if scope["path"] in GENERATING_ROUTES:
            self._metrics.request_rejected("unauthorized")
        message = (
            "the API key is not valid here"
            if shown
            else "an API key is required: send Authorization: Bearer KEY"
        )
        body = error_body(message, status=401, code="invalid_api_key")
        refusal = Response(
            json_bytes(body), 401, headers={"www-authenticate": "Bearer"}, media_type="application/json"
        )
        await refusal(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest().encode()
        # Every digest is compared, whole: time tells neither which key nor how much of it was right.
        matches = sum(hmac.compare_digest(digest, known) for known in self._digests)
        return scheme.lower() == "bearer" and matches > 0
