"""Kill instances in the middle of streams, and check that clients notice nothing while another instance lives.

    python benchmarks/resume.py [--splitwise] [--tokens 64] [--step 1]            kill -9 at every token of a stream
    python benchmarks/resume.py --load [--splitwise] [--seconds 60] [--every 10]  200 streams, a kill every ten seconds

The program starts our router and instances of our engine with the small checkpoint (``python -m engine.make_model``):
mixed instances, or with ``--splitwise`` one prefill instance and several decode instances, of which one is killed. In
the first form, the instance that answers is killed with SIGKILL when the client has read N tokens, for each N, by chat
and by completions. Text and usage must equal those of an undisturbed stream. In the second form, streams run all the
time, and each text must equal the answer to the same prompt before the first kill. The program ends with 1 if a stream
differs.

At least two instances serve when one is killed. In the first form there are two more, so that a kill does not have to
wait for the start of an instance. Instances are forked from a process that has already imported their modules.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.make_model import make_model
from tests.support.ports import free_ports
from tests.support.processes import Child

READY_S = 240.0
PROBE_S = 60.0
SERVING = 2  # instances that serve when one is killed
MAX_SEQUENCES = 128  # sequences that an instance runs at once
PROMPT = "Tell me a story about the sea, the sun and the stars."
PROMPTS_UNDER_LOAD = 20
PATHS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
}
# A client without TLS; with TLS, it would read a large file of certificate authorities.
CLIENT = httpx.Client(trust_env=False, verify=False, timeout=300, limits=httpx.Limits(max_connections=None))


class Fleet:
    """A router and its instances. A killed instance (mixed or decode) starts again."""

    def __init__(self, folder: Path, model: Path, *, splitwise: bool, instances: int) -> None:
        self.role = "decode" if splitwise else "mixed"
        self._folder, self._model = folder, model
        self._lives = 0
        self._running: dict[int, Child] = {}
        router, prefill, *ports = free_ports(2 + instances)
        self.url = f"http://127.0.0.1:{router}"
        self._router = router
        flags = ["--host", "127.0.0.1", "--port", str(router), "--workers", "1", *["--splitwise"] * splitwise]
        # On a busy machine, an instance that computes on a CPU may answer a probe late.
        flags += ["--health-check-timeout-secs", str(PROBE_S)]
        self._running[router] = Child([sys.executable, "-m", "router.launch", *flags], folder / "router.log")
        self._needed = {"mixed": 0, "prefill": 0, "decode": 0, self.role: SERVING}
        if splitwise:
            self._needed["prefill"] = 1
            self.start_instance(prefill, "prefill")
        for port in ports:
            self.start_instance(port, self.role)

    def start_instance(self, port: int, role: str) -> None:
        """Start an instance at this port; it registers at the router when it is ready."""
        self._lives += 1
        argv = [sys.executable, "-m", "engine.api_server", "--model", str(self._model), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--router", f"127.0.0.1:{self._router}", "--max-num-seqs", str(MAX_SEQUENCES)]
        argv += [] if role == "mixed" else ["--splitwise-role", role]
        log = self._folder / f"{role}_{port}_{self._lives}.log"
        env = {"FD_LOG_DIR": str(self._folder / f"log_{port}")}
        self._running[port] = Child(argv, log, env, is_forked=True)

    def kill_instance(self, port: int) -> None:
        """Kill the instance at this port with SIGKILL, and start it again."""
        self._running[port].kill()
        self.start_instance(port, self.role)

    def list_serving(self, role: str) -> list[int]:
        """Return the ports of the instances that serve: healthy for the router, and with a successful health check.

        The health check is necessary because the router may not have noticed a kill yet.
        """
        with contextlib.suppress(httpx.HTTPError, KeyError):
            registered = CLIENT.get(f"{self.url}/registered").json()[role]
            ports = [int(each["port"]) for each in registered if each["state"] == "healthy"]
            return [port for port in ports if self._answers(port)]
        return []

    def wait_until_whole(self) -> None:
        """Wait until enough instances of each role serve."""
        give_up_at = time.monotonic() + READY_S
        while any(len(self.list_serving(role)) < needed for role, needed in self._needed.items() if needed):
            if time.monotonic() > give_up_at:
                sys.exit(f"{self._needed} do not serve within {READY_S:g} s; their logs are in {self._folder}")
            time.sleep(0.1)

    def count_resumptions(self) -> int:
        """Return how often the router resumed a stream on another instance."""
        lines = CLIENT.get(f"{self.url}/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("router_resumptions_total{"))

    def stop(self) -> None:
        """Kill the router and all instances."""
        for process in self._running.values():
            process.kill()
            process.end_group()

    def _answers(self, port: int) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return CLIENT.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False


class Broken(Exception):
    """Raised if a stream did not end properly."""


class Result(NamedTuple):
    """The text of one stream, and the prompt tokens in its usage."""

    text: str
    prompt_tokens: int


def read_stream(fleet: Fleet, path: str, text: str, tokens: int, kill_after: int | None = None) -> Result:
    """Read one greedy stream; kill its instance after ``kill_after`` events with text if that is given.

    Raises:
        Broken: the stream ended with an error, or twice, or not at all, or its usage is wrong.
    """
    body: dict[str, Any] = {**PATHS[path](text), "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    answer, finishes, usages, done, count = "", 0, [], 0, 0
    with CLIENT.stream("POST", f"{fleet.url}{path}", json=body) as response:
        if response.status_code != 200:
            raise Broken(f"{response.status_code} {response.read()[:300]!r}")
        port = int(response.headers[f"x-router-{fleet.role}"].rpartition(":")[2])
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done += 1
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise Broken(str(chunk)[:300])
            for choice in chunk["choices"]:
                answer += choice.get("delta", choice).get("content", choice.get("text", "")) or ""
                finishes += bool(choice["finish_reason"])
                count += 1
            usages += [chunk["usage"]] if chunk.get("usage") else []
            if kill_after is not None and count >= kill_after:
                kill_after = None
                fleet.kill_instance(port)
    if (finishes, done, [usage["completion_tokens"] for usage in usages]) != (1, 1, [tokens]):
        raise Broken(f"{finishes} finish reasons, {done} [DONE], usage {usages}")
    return Result(answer, usages[0]["prompt_tokens"])


def kill_at_every_token(fleet: Fleet, tokens: int, step: int) -> list[str]:
    """Read streams with a kill after each ``step`` tokens; return a sentence for each stream that was wrong."""
    wrong = []
    for path in PATHS:
        fleet.wait_until_whole()
        whole = read_stream(fleet, path, PROMPT, tokens)
        equal, runs = 0, range(1, tokens + 1, step)
        for kill_after in runs:
            fleet.wait_until_whole()
            try:
                equal += (result := read_stream(fleet, path, PROMPT, tokens, kill_after)) == whole
                wrong += [] if result == whole else [f"{path}, killed after {kill_after}: another answer: {result}"]
            except (Broken, httpx.HTTPError) as exc:
                wrong.append(f"{path}, killed after {kill_after}: {type(exc).__name__} {exc}")
        print(f"{path}: {equal} of {len(runs)} texts equal the undisturbed one", flush=True)
    print(f"{fleet.count_resumptions()} streams were resumed")
    return wrong


def kill_under_load(fleet: Fleet, tokens: int, seconds: float, every: float, streams: int) -> list[str]:
    """Run ``streams`` streams at once for ``seconds``, with a kill every ``every`` seconds.

    Returns:
        A sentence for each kind of error.
    """
    fleet.wait_until_whole()
    asked = [(path, f"{PROMPT} {number}") for number in range(PROMPTS_UNDER_LOAD) for path in PATHS]
    with ThreadPoolExecutor(len(asked)) as pool:
        results = pool.map(lambda each: read_stream(fleet, each[0], each[1], tokens), asked)
        whole = dict(zip(asked, results, strict=True))
    tally: Counter[str] = Counter()
    ends_at = time.monotonic() + seconds

    def ask(number: int) -> None:
        while time.monotonic() < ends_at:
            each = asked[number % len(asked)]
            try:
                result = read_stream(fleet, each[0], each[1], tokens)
                tally["whole" if result == whole[each] else "another answer"] += 1
            except (Broken, httpx.HTTPError) as exc:
                tally[f"{type(exc).__name__} {exc}"] += 1
                time.sleep(0.5)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    kills = 0
    while time.monotonic() < ends_at:
        time.sleep(every)
        if len(serving := fleet.list_serving(fleet.role)) > 1:  # so that another instance can resume
            fleet.kill_instance(serving[kills % len(serving)])
            kills += 1
    for thread in threads:
        thread.join()
    resumed = fleet.count_resumptions()
    print(f"{tally.total()} streams, {tally['whole']} whole, {kills} kills, {resumed} streams resumed")
    return [f"{count} times: {how}" for how, count in tally.items() if how != "whole"]


@contextlib.contextmanager
def running_fleet(*, splitwise: bool, instances: int) -> Iterator[Fleet]:
    """Run a fleet with a temporary checkpoint during the ``with`` block."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_model(model)
        fleet = Fleet(Path(name), model, splitwise=splitwise, instances=instances)
        try:
            yield fleet
        finally:
            fleet.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the form that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splitwise", action="store_true", help="pairs: one prefill, and decode instances")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each stream (default 64)")
    parser.add_argument("--step", type=int, default=1, help="tokens from one kill to the next (default 1)")
    parser.add_argument(
        "--load", action="store_true", help="instead, run many streams with a kill every --every seconds"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the load runs (default 60)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills (default 10)")
    parser.add_argument("--streams", type=int, default=200, help="streams at once under load (default 200)")
    parser.add_argument("--instances", type=int, help="instances that can be killed (default 4, or 2 under load)")
    options = parser.parse_args(argv)
    instances = options.instances or (SERVING if options.load else SERVING + 2)
    with running_fleet(splitwise=options.splitwise, instances=instances) as fleet:
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
