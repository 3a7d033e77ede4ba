"""The door: which requests reach the application at all.

Plain ASGI, before any body is parsed. On loopback the Host header must name this machine, which
stops DNS rebinding; elsewhere a token is asked for. A request that another site's page makes is
refused, so there is nothing to forge. Bodies are counted while they stream.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "p3net_token"

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine in a Host header."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""With every answer: nothing from elsewhere is loaded, shown, framed or told where we are."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may come in, and with how much.

    Attributes:
        token: asked of everybody; None on loopback.
        body_bytes: the largest body.
    """

    token: str | None = None
    body_bytes: int = 65_000_000


class Guard:
    """The middleware."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self.rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with counted body and safe headers."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(message, private=scope["path"].startswith("/api"))
            await send(message)

        headers = Headers(scope=scope)
        refusal = self.refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, guarded)
            return
        await self.app(scope, self._counting(receive), guarded)

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request that may not pass."""
        host = headers.get("host", "")
        if self.rules.token is None:
            if re.sub(r":\d+$", "", host).lower() not in LOOPBACK:
                return _refuse(421, "this server answers to localhost only")
        elif not self._knows_token(headers):
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if scope["method"] == "GET" and scope["path"] == "/" and self._is_token(given):
                return self._welcome()
            return _refuse(401, "open the address that p3net serve printed; it has the token")
        origin = headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        site = headers.get("sec-fetch-site", "none")
        if scope["path"].startswith("/api") and (foreign or site in ("cross-site", "same-site")):
            return _refuse(403, "requests from other sites are refused")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.rules.body_bytes:
            return _refuse(413, self._too_large)
        return None

    def _knows_token(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer):
            return True
        try:
            cookie: SimpleCookie = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return COOKIE in cookie and self._is_token(cookie[COOKIE].value)

    def _is_token(self, text: str) -> bool:
        token = self.rules.token or ""
        return bool(token) and hmac.compare_digest(text.encode(), token.encode())

    def _welcome(self) -> Response:
        """Keep the token in a cookie and take it out of the address."""
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            COOKIE, self.rules.token or "", httponly=True, samesite="strict", max_age=30 * 86400
        )
        return answer

    def _counting(self, receive: Receive) -> Receive:
        total = 0

        async def counted() -> Message:
            nonlocal total
            message: MutableMapping[str, Any] = await receive()
            total += len(message.get("body", b""))
            if total > self.rules.body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted

    @property
    def _too_large(self) -> str:
        return f"more than {self.rules.body_bytes:,} bytes are not taken"


def _refuse(status: int, words: str) -> Response:
    return JSONResponse({"detail": words}, status)


def _add_headers(message: Message, *, private: bool) -> None:
    names = {name.lower() for name, _ in message["headers"]}
    extra = HEADERS | ({"Cache-Control": "no-store"} if private else {"Cache-Control": "no-cache"})
    message["headers"] = [
        *message["headers"],
        *((k.encode(), v.encode()) for k, v in extra.items() if k.lower().encode() not in names),
    ]
