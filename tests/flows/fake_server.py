"""Answers the few calls that are made to a Prefect server before Prefect is imported.

Run as a program, `fake_server.py PORT [broken]`; it starts in a fraction of the real one's time.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AUTOMATIONS: list[Any] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(True)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/automations/":
            AUTOMATIONS.append(body)
        self.answer(AUTOMATIONS if self.path.startswith("/api/automations/") else [])

    def answer(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)


if __name__ == "__main__":
    if "broken" in sys.argv:
        sys.exit("database is locked")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
