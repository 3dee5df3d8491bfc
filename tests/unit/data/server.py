"""An HTTP server on loopback that can fail: errors, cut transfers, missing and forbidden files."""

from __future__ import annotations

import http.server
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FaultyServer:
    """Serves a folder with ranges.

    Attributes:
        errors: Share of requests that end with 503.
        cuts: Share of transfers that end half way.
        forbidden: Whether every request is refused with 403.
        gets: Requests for each path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.errors, self.cuts, self.forbidden = folder, 0.0, 0.0, False
        self.gets: Counter[str] = Counter()
        self.random, self.lock = random.Random(0), threading.Lock()
        self.url = ""


@contextmanager
def faulty_server(folder: Path) -> Iterator[FaultyServer]:
    state = FaultyServer(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(head=True)

        def do_GET(self) -> None:
            self.answer(head=False)

        def answer(self, head: bool) -> None:
            with state.lock:
                dice = state.random.random()
                state.gets[self.path] += not head
            path = state.folder / self.path.lstrip("/")
            status = 403 if state.forbidden else 404 if not path.is_file() else 503 if dice < state.errors else 200
            if status != 200:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            first, last = 0, len(data) - 1
            wanted = self.headers.get("Range")
            if wanted:
                low, _, high = wanted.removeprefix("bytes=").partition("-")
                first, last = int(low), min(last, int(high or last))
            self.send_response(206 if wanted else 200)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(last - first + 1))
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            self.end_headers()
            if head:
                return
            part = data[first : last + 1]
            if state.errors <= dice < state.errors + state.cuts:
                self.wfile.write(part[: len(part) // 2])
                self.wfile.flush()
                return
            self.wfile.write(part)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
