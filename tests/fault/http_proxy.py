"""An HTTP proxy on 127.0.0.1 that spoils the N-th request to a real server, in the ways that networks and stores do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})


class Spoil(Enum):
    THROTTLE = "503 Slow Down"
    ERROR = "500 Internal Error"
    DROP = "connection closed before the request was forwarded"
    LOSE = "request forwarded, connection closed instead of the answer"
    STALL = "request forwarded, answer held back until the client gave up"
    CUT = "half of the answer's body"


class Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._at: int | None = None
        self._spoil = Spoil.ERROR
        self._lasting = False
        self.num_requests = 0
        self.num_spoilt = 0
        self.let_go = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def plan(self, spoil: Spoil, *, at: int | None, lasting: bool = False) -> None:
        """Counts from 0 again; spoils request `at`, or all from it on."""
        with self._lock:
            self._at, self._spoil, self._lasting = at, spoil, lasting
            self.num_requests = self.num_spoilt = 0

    def next_spoil(self) -> Spoil | None:
        with self._lock:
            number = self.num_requests
            self.num_requests += 1
            due = self._at is not None and (number == self._at or (self._lasting and number > self._at))
            self.num_spoilt += due
            return self._spoil if due else None

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up is what these tests are about; there is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        spoil = self.server.next_spoil()
        if spoil in (Spoil.THROTTLE, Spoil.ERROR):
            code, _, word = spoil.value.partition(" ")
            self._answer(int(code), {}, f"<Error><Code>{word.replace(' ', '')}</Code></Error>".encode())
            return
        if spoil is Spoil.DROP:
            self.close_connection = True
            return
        status, headers, answer = self._forward(body)
        if spoil is Spoil.STALL:
            self.server.let_go.wait(30)
        if spoil in (Spoil.LOSE, Spoil.STALL):
            self.close_connection = True
            return
        self._answer(status, headers, answer, cut=spoil is Spoil.CUT)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815  # names that http.server looks up

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream.request(self.command, self.path, body=body, headers=headers | {"Content-Length": str(len(body))})
            response = upstream.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            upstream.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP_BY_HOP | {"date", "server"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def log_message(self, message: str, *args: object) -> None:
        return


@contextmanager
def proxy_before(upstream: str) -> Iterator[Proxy]:
    with Proxy(upstream) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.let_go.set()
            proxy.shutdown()
            thread.join()
