"""The gate: whatever does not come from our own page is refused before any route sees it.

Other pages that are open in the same browser can send requests to a loopback address, and a name
that a stranger owns can be made to point there (DNS rebinding). So the Host must be ours, the
Origin must be ours wherever a browser sends one, and the path begins with a token that only the
person at the terminal was shown.
"""

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost", "[::1]")
METHODS = ("GET", "HEAD")
MOST_SOCKETS = 32  # open at a time; a page has two
TRY_LATER = 1013  # the WebSocket protocol's code


class Gate:
    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._hosts = {f"{host}:{port}" for host in HOSTS}
        if port == 80:  # the one that browsers leave out
            self._hosts |= set(HOSTS)
        self._origins = {f"http://{host}" for host in self._hosts}
        self._headers = _headers(port)
        self._sockets = 0  # that are open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
            return
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        if refusal:
            app: ASGIApp = PlainTextResponse(f"{refusal[1]}\n", refusal[0])
        else:
            app, scope = self._app, self._inside(scope)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await app(scope, receive, send_safely)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sockets stay open: beyond a number, pages are still served and sockets are not."""
        if self._sockets >= MOST_SOCKETS:
            reason = "too many pages of this lab are open; close one"
            await send({"type": "websocket.close", "code": TRY_LATER, "reason": reason})
            return
        self._sockets += 1
        try:
            await self._app(self._inside(scope), receive, send)
        finally:
            self._sockets -= 1

    def _inside(self, scope: Scope) -> Scope:
        return {**scope, "root_path": f"/{self._token}"}

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and words; None: come in."""
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 421, "this server answers only to its own loopback address"
        socket = scope["type"] == "websocket"
        if (origins or socket) and (len(origins) != 1 or origins[0] not in self._origins):
            return 403, "this server answers only to its own page"
        given = scope["path"].split("/", 2)[1] if scope["path"].startswith("/") else ""
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return 403, "open the address that `scaledot lab` printed, with its token"
        if socket:
            return None
        if scope["method"] not in METHODS:
            return 405, "there is nothing to send here"
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return 413, "there is nothing to send here"
        return None


def _headers(port: int) -> dict[str, str]:
    policy = {
        "default-src": "'self'",
        # 'self' covers the WebSocket in some browsers and not in others.
        "connect-src": f"'self' ws://127.0.0.1:{port} ws://localhost:{port}",
        "img-src": "'self' data: blob:",  # charts on their way into a PNG
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "object-src": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",  # the address holds the token
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
