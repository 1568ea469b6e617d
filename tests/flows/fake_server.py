"""Answers the few calls that are made to a Prefect server before Prefect is imported.

Run as a program, `fake_server.py PORT [broken]`; it starts in a fraction of the real one's time.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AUTOMATIONS: list[Any] = []
BUSY: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(True)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/api/busy/"):  # the number says how often
            BUSY[self.path] += 1
            is_busy = BUSY[self.path] <= int(self.path.rpartition("/")[2])
            return self.answer([], 503 if is_busy else 200)
        if self.path == "/api/missing":
            return self.answer({"detail": "Not Found"}, 404)
        if self.path == "/api/automations/":
            AUTOMATIONS.append(body)
        return self.answer(AUTOMATIONS if self.path.startswith("/api/automations/") else [])

    def answer(self, document: Any, status: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)


if __name__ == "__main__":
    if "broken" in sys.argv:
        sys.exit("database is locked")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
