"""Serves the run page: GET only, a few fixed paths, numbers as arguments; and writes it as one file."""

from __future__ import annotations

import ipaddress
import json
import secrets
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from deepspeed.run_page.reader import Cursor, RunFiles, runs_of

_POLL = 0.25  # seconds between two looks at a file that may have grown
_PIECE = 4 << 20
_SILENCE = 15.0
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
_DATA = "/*DATA*/null"


def _page() -> str:
    return files("deepspeed.run_page").joinpath("page.html").read_text(encoding="utf-8")


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class RunPage:
    """What is shown: the runs of some folders, and a plan to compare with."""

    def __init__(self, folders: list[Path], plan: dict[str, float] | None = None) -> None:
        self._folders, self._plan = folders, plan

    def runs(self) -> list[RunFiles]:
        """The runs there are now."""
        return list(runs_of(self._folders))

    def overview(self) -> dict[str, Any]:
        """The names of the runs and the plan."""
        runs = [{"name": run.name, "ranks": len(run.ranks)} for run in self.runs()]
        return {"runs": runs, "plan": self._plan}

    def static(self) -> str:
        """The page with all data in it, which asks for nothing."""
        runs = [{**run.read(), "ranks": run.lanes()} for run in self.runs()]
        text = json.dumps({**self.overview(), "data": runs}, separators=(",", ":"))
        safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        return _page().replace(_DATA, safe, 1)


class RunPageServer(ThreadingHTTPServer):
    """Serves a page until `shutdown`; elsewhere than on loopback every request needs the token."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, page: RunPage, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.page = page
        self.open_to_others = not is_loopback(host)
        self.token = token or (secrets.token_urlsafe(24) if self.open_to_others else None)
        self.ending = False
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/" + (f"?token={self.token}" if self.token else "")

    def shutdown(self) -> None:
        """End, streams too."""
        self.ending = True
        super().shutdown()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: RunPageServer
    server_version = "deepspeed"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """The page, its data, or a stream of what is new."""
        parts = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=8).items()}
        if not self._may(asked.get("token", "")):
            return
        page = self.server.page
        if parts.path == "/":
            self._send(_page().encode(), "text/html; charset=utf-8")
        elif parts.path == "/runs":
            self._json(page.overview())
        elif parts.path in ("/data", "/ranks", "/stream"):
            run = self._run(asked.get("run", ""))
            rank = asked.get("rank")
            if run is None or (rank is not None and (not rank.isdecimal() or int(rank[:9]) not in run.ranks)):
                self.send_error(404)
            elif parts.path == "/data":
                self._json(run.read(None if rank is None else int(rank)))
            elif parts.path == "/ranks":
                self._json(run.lanes())
            else:
                self._stream(run, Cursor.parse(self.headers.get("Last-Event-ID") or asked.get("cursor", "")))
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _may(self, token: str) -> bool:
        """Other pages in the user's browser reach loopback too, under names of their own: those are refused."""
        server = self.server
        named = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if not server.open_to_others and not is_loopback(named):
            self.send_error(403, "this page is served to this machine only")
            return False
        if server.token is not None and not secrets.compare_digest(token.encode(), server.token.encode()):
            self.send_error(403, "the token is missing or wrong")
            return False
        return True

    def _run(self, text: str) -> RunFiles | None:
        runs = self.server.page.runs()
        index = int(text[:9]) if text.isdecimal() else len(runs)
        return runs[index] if index < len(runs) else None

    def _json(self, value: object) -> None:
        self._send(json.dumps(value, separators=(",", ":")).encode(), "application/json")

    def _head(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")

    def _send(self, body: bytes, kind: str) -> None:
        self._head(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, run: RunFiles, cursor: Cursor) -> None:
        """Server-sent events; the id of each says where a browser that comes back goes on."""
        self._head("text/event-stream")
        self.end_headers()
        said = time.monotonic()
        while not self.server.ending:
            found = run.read(None, cursor, _PIECE)
            cursor = Cursor.parse(found["cursor"])
            if found["count"]:
                self.wfile.write(f"id: {cursor}\ndata: {json.dumps(found, separators=(',', ':'))}\n\n".encode())
                said = time.monotonic()
            elif time.monotonic() - said > _SILENCE:  # shows that the browser has gone
                self.wfile.write(b": nothing new\n\n")
                said = time.monotonic()
            else:
                time.sleep(_POLL)
