"""What clients see of instances that are killed in the middle of streams: nothing, while another one lives.

    python benchmarks/resume.py [--tokens 64] [--step 1]            kill -9 at every token of a greedy stream
    python benchmarks/resume.py --load [--seconds 60] [--every 10]  200 streams, an instance killed every ten seconds

Two mixed instances of our engine, the small checkpoint (``python -m engine.make_model``) and our router. In the first
form the instance that answers is killed with SIGKILL once the client has read so many tokens, for each number of them,
of chat and of completions; the text must equal the undisturbed one. In the second, streams of one prompt each run all
the time; each text must equal the first one of its prompt. The program ends with 1 if one did not.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from router_overhead import free_port

READY_S = 120.0
PROMPT = "Tell me a story about the sea, the sun and the stars."
PATHS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
}


class Fleet:
    """Two instances behind a router, each started again after it was killed."""

    def __init__(self, folder: Path, model: str) -> None:
        self.router = free_port()
        self._folder, self._model = folder, model
        self._ports = [free_port(), free_port()]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._start("router", "router.launch", "--host", "127.0.0.1", "--port", str(self.router), "--workers", "1")
        for port in self._ports:
            self.start_instance(port)

    def start_instance(self, port: int) -> None:
        """Start the instance of this port; it registers when it can serve."""
        address = ["--host", "127.0.0.1", "--port", str(port), "--router", f"127.0.0.1:{self.router}"]
        self._running[port] = self._start(f"instance_{port}", "engine.api_server", "--model", self._model, *address)

    def kill_instance(self, port: int) -> None:
        """End it as a crash would."""
        self._running[port].send_signal(signal.SIGKILL)
        self._running[port].wait()

    def list_healthy(self) -> list[int]:
        """The ports of the instances that serve."""
        with contextlib.suppress(httpx.HTTPError, KeyError):
            told = httpx.get(f"http://127.0.0.1:{self.router}/registered", trust_env=False).json()
            return [
                each["port"] for each in told["mixed"] if each["state"] == "healthy" and self._answers(each["port"])
            ]
        return []

    def wait_until_whole(self) -> None:
        """Wait until both serve."""
        give_up_at = time.monotonic() + READY_S
        while len(self.list_healthy()) < 2:
            if time.monotonic() > give_up_at:
                sys.exit(f"two instances do not serve within {READY_S:g} s; their logs are in {self._folder}")
            time.sleep(0.2)

    def _answers(self, port: int) -> bool:
        """Whether it serves: the router may not have noticed yet that it was killed."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
        return False

    def stop(self) -> None:
        """End all of them."""
        for process in (*self._running.values(), self._running_router):
            process.kill()
            process.wait()

    def _start(self, name: str, module: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        if name == "router":
            self._running_router = process
        return process


class Broken(Exception):
    """A stream that did not end as it should."""


def read_stream(fleet: Fleet, path: str, text: str, tokens: int, kill_after: int | None = None) -> str:
    """The text of one greedy stream; the instance that answers is killed once so many events have come.

    Raises:
        Broken: it ended with an error, or twice, or not at all.
    """
    body: dict[str, Any] = {**PATHS[path](text), "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    said, finishes, usages, done, count = "", 0, [], 0, 0
    url = f"http://127.0.0.1:{fleet.router}{path}"
    with httpx.Client(trust_env=False, timeout=120) as client, client.stream("POST", url, json=body) as response:
        port = int(response.headers.get("x-router-mixed", ":0").rpartition(":")[2])
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done += 1
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk or response.status_code != 200:
                raise Broken(str(chunk)[:300])
            for choice in chunk["choices"]:
                said += choice.get("delta", choice).get("content", choice.get("text", "")) or ""
                finishes += bool(choice["finish_reason"])
                count += 1
            usages += [chunk["usage"]["completion_tokens"]] if chunk.get("usage") else []
            if kill_after is not None and count >= kill_after:
                kill_after = None
                fleet.kill_instance(port)
                fleet.start_instance(port)
    if (finishes, done, usages) != (1, 1, [tokens]):
        raise Broken(f"{finishes} finish reasons, {done} [DONE], usage {usages}")
    return said


def kill_at_every_token(fleet: Fleet, tokens: int, step: int) -> list[str]:
    """What was wrong; one sentence each."""
    wrong = []
    for path in PATHS:
        fleet.wait_until_whole()
        whole = read_stream(fleet, path, PROMPT, tokens)
        equal, runs = 0, range(1, tokens + 1, step)
        for kill_after in runs:
            fleet.wait_until_whole()
            try:
                equal += (said := read_stream(fleet, path, PROMPT, tokens, kill_after)) == whole
                wrong += [] if said == whole else [f"{path}, killed after {kill_after}: another text"]
            except (Broken, httpx.HTTPError) as exc:
                wrong.append(f"{path}, killed after {kill_after}: {type(exc).__name__} {exc}")
        print(f"{path}: {equal} of {len(runs)} texts equal the undisturbed one", flush=True)
    return wrong


def kill_under_load(fleet: Fleet, tokens: int, seconds: float, every: float, streams: int) -> list[str]:
    """What was wrong; one sentence each."""
    fleet.wait_until_whole()
    tally: Counter[str] = Counter()
    texts: dict[str, str] = {}
    ends_at = time.monotonic() + seconds

    def ask(number: int) -> None:
        while time.monotonic() < ends_at:
            path, prompt = list(PATHS)[number % 2], f"{PROMPT} {number % 20}"
            try:
                said = read_stream(fleet, path, prompt, tokens)
                tally["whole" if texts.setdefault(path + prompt, said) == said else "another text"] += 1
            except (Broken, httpx.HTTPError) as exc:
                tally[f"{type(exc).__name__} {exc}"] += 1
                time.sleep(0.5)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    kills = 0
    while time.monotonic() < ends_at:
        time.sleep(every)
        if len(healthy := fleet.list_healthy()) > 1:  # the other one lives
            port = healthy[kills % 2]
            fleet.kill_instance(port)
            fleet.start_instance(port)
            kills += 1
    for thread in threads:
        thread.join()
    metrics = httpx.get(f"http://127.0.0.1:{fleet.router}/metrics", trust_env=False).text
    resumed = sum(
        float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("router_resumptions_total{")
    )
    print(f"{tally.total()} streams, {tally['whole']} whole, {kills} kills, {resumed:.0f} times one went on elsewhere")
    return [f"{count} times: {how}" for how, count in tally.items() if how != "whole"]


@contextlib.contextmanager
def running_fleet() -> Iterator[Fleet]:
    """The fleet, ended at the end."""
    with tempfile.TemporaryDirectory() as name:
        model = f"{name}/model"
        subprocess.run(
            [sys.executable, "-m", "engine.make_model", "--output", model], check=True, stdout=subprocess.DEVNULL
        )
        fleet = Fleet(Path(name), model)
        try:
            yield fleet
        finally:
            fleet.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one form; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream (default 64)")
    parser.add_argument("--step", type=int, default=1, help="kill at each so many tokens (default 1)")
    parser.add_argument("--load", action="store_true", help="many streams instead, with a kill now and then")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load runs (default 60)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills under load (default 10)")
    parser.add_argument("--streams", type=int, default=200, help="at once, under load (default 200)")
    options = parser.parse_args(argv)
    with running_fleet() as fleet:
        if options.load:
            wrong = kill_under_load(fleet, options.tokens, options.seconds, options.every, options.streams)
        else:
            wrong = kill_at_every_token(fleet, options.tokens, options.step)
    for each in wrong:
        print(each)
    print("failed" if wrong else "passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
