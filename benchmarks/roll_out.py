"""Replace four instances one after the other under 64 streams, and check that clients notice nothing.

    python benchmarks/roll_out.py [--streams 64] [--tokens 48] [--workers 2]

The program starts our router and four mixed instances of our engine with the small checkpoint (``python -m
engine.make_model``). It drains each instance (``kvrouter drain --wait --until-restart``), ends it with SIGTERM, and
starts it again at the same port; it goes on with the next instance when ``/ready`` of the new process succeeds. Each
stream must have the text of an earlier, undisturbed stream, and one end. The program ends with 1 if a stream differs,
or if a request is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
from router_overhead import free_port

READY_S = 600.0
INSTANCES = 4
PROMPTS = [f"Tell me story number {number} about the sea, the sun and the stars." for number in range(8)]


class Fleet:
    """A router and its instances."""

    def __init__(self, folder: Path, model: str, workers: int) -> None:
        self.router = f"127.0.0.1:{free_port()}"
        self.ports = [free_port() for _ in range(INSTANCES)]
        self._folder, self._model = folder, model
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        port = self.router.rpartition(":")[2]
        self._start(0, "router.launch", "--host", "127.0.0.1", "--port", port, "--workers", str(workers))

    def start(self) -> None:
        """Start all instances, and wait until they serve."""
        for port in self.ports:
            self.start_instance(port)
        for port in self.ports:
            self.wait_until_ready(port)

    def start_instance(self, port: int) -> None:
        """Start an instance at this port."""
        address = ["--host", "127.0.0.1", "--port", str(port), "--router", self.router]
        self._start(port, "engine.api_server", "--model", self._model, "--max-num-seqs", "32", *address)

    def wait_until_ready(self, port: int) -> None:
        """Wait until ``/ready`` of the instance succeeds: it serves, and the router knows it."""
        give_up_at = time.monotonic() + READY_S
        while not self._is_ready(port):
            if time.monotonic() > give_up_at:
                sys.exit(f"instance {port} does not serve within {READY_S:g} s; the logs are in {self._folder}")
            time.sleep(0.2)

    def end_instance(self, port: int) -> int:
        """End the instance with SIGTERM, as an orchestrator does; return its exit status."""
        self._processes[port].send_signal(signal.SIGTERM)
        return self._processes[port].wait(60)

    def stop(self) -> None:
        """Kill the router and all instances."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _is_ready(self, port: int) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200
        return False

    def _start(self, key: int, module: str, *flags: str) -> None:
        with (self._folder / f"{key or 'router'}.log").open("ab") as log:
            self._processes[key] = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "FD_LOG_DIR": str(self._folder / f"log_{key}")},
            )


def read_stream(client: httpx.Client, router: str, prompt: str, tokens: int) -> str:
    """Read a greedy stream; return its text, or a description of the error that begins with "!"."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    text, finishes, done = "", 0, 0
    try:
        with client.stream("POST", f"http://{router}/v1/completions", json=body) as response:
            if response.status_code != 200:
                return f"!{response.status_code} {response.read()[:200].decode()}"
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done += 1
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return f"!{chunk['error']}"
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    finishes += sum(bool(choice["finish_reason"]) for choice in chunk["choices"])
    except httpx.HTTPError as exc:
        return f"!{exc!r}"
    return text if (finishes, done) == (1, 1) else f"!{finishes} finish reasons, {done} [DONE]"


def main(argv: Sequence[str] | None = None) -> int:
    """Replace all instances once; return the exit status."""
    parser = argparse.ArgumentParser(description="Replace four instances under streams.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--workers", type=int, default=2)
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(folder / "model")
        subprocess.run(
            [sys.executable, "-m", "engine.make_model", "--output", model], check=True, stdout=subprocess.DEVNULL
        )
        fleet = Fleet(folder, model, flags.workers)
        try:
            fleet.start()
            return _roll(fleet, flags)
        finally:
            fleet.stop()


def _roll(fleet: Fleet, flags: argparse.Namespace) -> int:
    expected, outcomes, is_over = {}, Counter[str](), threading.Event()
    with httpx.Client(trust_env=False, timeout=300) as client:
        for prompt in PROMPTS:
            expected[prompt] = read_stream(client, fleet.router, prompt, flags.tokens)

    def keep_streaming(number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        with httpx.Client(trust_env=False, timeout=300) as client:
            while not is_over.is_set():
                text = read_stream(client, fleet.router, prompt, flags.tokens)
                outcomes["whole" if text == expected[prompt] else text[:200] if text[:1] == "!" else "another"] += 1

    streams = [threading.Thread(target=keep_streaming, args=(number,)) for number in range(flags.streams)]
    for stream in streams:
        stream.start()
    time.sleep(3)
    for port in fleet.ports:
        began = time.monotonic()
        command = [sys.executable, "-c", "import router.console as c, sys; sys.exit(c.main())", "drain"]
        command += [f"127.0.0.1:{port}", "--wait", "120", "--until-restart", "--router", fleet.router]
        drained = subprocess.run(command, stdout=subprocess.DEVNULL)
        empty_after = time.monotonic() - began
        status = fleet.end_instance(port)
        fleet.start_instance(port)
        fleet.wait_until_ready(port)
        whole = time.monotonic() - began
        print(f"{port}: drain ended {drained.returncode} after {empty_after:.1f} s, the process with {status}, "
              f"serves again after {whole:.1f} s; {dict(outcomes)}", flush=True)  # fmt: skip
    time.sleep(3)
    is_over.set()
    for stream in streams:
        stream.join()
    states = httpx.get(f"http://{fleet.router}/registered", trust_env=False).json()["mixed"]
    print(f"streams: {dict(outcomes)}; instances: {dict(Counter(each['state'] for each in states))}")
    return 0 if set(outcomes) == {"whole"} else 1


if __name__ == "__main__":
    sys.exit(main())
