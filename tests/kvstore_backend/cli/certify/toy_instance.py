"""A server with OpenAI's completions: ``toy_instance.py PORT MODEL FOLDER SABOTAGE MASTER_PORT``.

It stands in for an inference engine in the tests of ``kvstore certify``. Its "KV" are files in a folder, and an answer
depends on all bytes that were read, so wrong bytes change it. With a folder, it sends a request to the master's port
before each answer. ``SABOTAGE`` disables one protection of a shared pool. The model ``slow`` computes slowly.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.threaded_http import QuietHandler, ThreadedServer

CHUNK_WORDS = 10

port, model, folder, sabotage, master_port = int(sys.argv[1]), *sys.argv[2:]
hits = 0
own_paths: set[Path] = set()
saves = True
if sabotage == "shares nothing" and folder:
    folder = f"{folder}/{port}"
    Path(folder).mkdir()


def answer(prompt: str, salt: str) -> tuple[str, int]:
    """Return the answer, which depends on the KV of all chunks, and the number of tokens that were read."""
    global hits, saves
    words = prompt.split()
    chain, text, cached_tokens = "", hashlib.sha256(), 0
    if folder:
        ask_master()
    for start in range(0, len(words) - CHUNK_WORDS + 1, CHUNK_WORDS):
        own = f"{words[start : start + CHUNK_WORDS]}"
        chain = hashlib.sha256(f"{chain} {own}".encode()).hexdigest()
        computed = hashlib.sha256(f"{model} {chain}".encode()).hexdigest().encode()
        link = hashlib.sha256(own.encode()).hexdigest() if sabotage == "no chain" else chain
        name = link if sabotage == "no namespace" else f"{model}-{link}"
        path = Path(folder, name if sabotage == "no salt" else f"{name}-{salt}")
        found = read(path) if folder else None
        if found is not None:
            hits += CHUNK_WORDS
            cached_tokens += CHUNK_WORDS
            saves &= sabotage != "saves nothing after a load" or path in own_paths
        elif folder and saves:
            own_paths.add(path)
            path.write_bytes(computed + hashlib.sha256(computed).hexdigest().encode())
        if found is None and model == "slow":
            time.sleep(0.01)
        text.update(found or computed)
    return "" if sabotage == "one answer" else text.hexdigest(), cached_tokens


def ask_master() -> None:
    """Wait a short time for the master's answer."""
    with contextlib.suppress(OSError):
        seconds = None if sabotage == "no deadline" else 0.05
        urllib.request.urlopen(f"http://127.0.0.1:{master_port}/health", timeout=seconds).close()


def read(path: Path) -> bytes | None:
    """Return the KV of a chunk; None if it is missing or damaged."""
    if not path.exists():
        return None
    time.sleep(0.02 if sabotage in ("fails", "dies") else 0.002)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if sabotage in ("fails", "dies"):
            raise
        return None
    kv, checksum = data[:64], data[64:]
    if sabotage != "no check" and hashlib.sha256(kv).hexdigest().encode() != checksum:
        path.unlink(missing_ok=True)
        return None
    return kv


class Handler(QuietHandler):
    """Answers requests for completions, metrics and health."""

    def do_GET(self) -> None:
        """Send metrics, or an empty page."""
        self._send(200, f"toy_hits_total {hits}\n".encode() if self.path == "/metrics" else b"")

    def do_POST(self) -> None:
        """Send one completion."""
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if sabotage == "slow" and folder:
            time.sleep(1)
        try:
            text, cached_tokens = answer(body["prompt"], body.get("cache_salt", ""))
        except FileNotFoundError as exc:
            if sabotage == "dies":
                os._exit(1)
            self._send(500, str(exc).encode())
        else:
            content = {
                "object": "text_completion",
                "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
                "usage": {"prompt_tokens_details": {"cached_tokens": cached_tokens}},
            }
            if body.get("stream"):
                self._send(200, f"data: {json.dumps(content)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")
            else:
                self._send(200, json.dumps(content).encode())

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


ThreadedServer(Handler, port).serve_forever()
