"""Kill vLLM instances during streams, and check that the clients of the streams notice nothing.

    python examples/vllm/run_kills.py [--connector kvstore|nixl] [--tokens N] [--every N] [--from N] [--to N]
        [--path PATH] [--decodes N] [--model FOLDER]

There are a prefill instance, some decode instances, and our router in splitwise mode. The client reads some tokens of a
greedy stream (chat and completions); then the decode instance that answers is killed with ``kill -9``, and another one
continues the stream. The stream's text must equal that of an earlier stream without a kill, with one end, and the usage
must count each token once. The killed instance then starts again, which takes a minute. ``--path``, ``--from`` and
``--to`` divide a long run into parts. ``README.md`` in this folder lists the required packages.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

from asking import words
from cluster import MODEL, START_S, Cluster, Connector, fail, find_model, make_parser, metric, scratch

PATHS = ("/v1/chat/completions", "/v1/completions")
PROMPT_WORDS = 300


class Stream(NamedTuple):
    """One stream as its client received it.

    Attributes:
        finishes: number of events with a finish reason.
        completion_tokens: the ``completion_tokens`` of each event with usage.
        is_done: whether the stream ended with ``[DONE]``.
        error: the last error event; "" if there was none.
    """

    text: str
    finishes: int
    completion_tokens: list[int]
    is_done: bool
    error: str


class Fleet:
    """A prefill instance, decode instances that can be killed, and their router."""

    def __init__(self, cluster: Cluster, connector: Connector, decodes: int) -> None:
        self._cluster = cluster
        self._connector = connector
        self.kills = 0
        prefill = cluster.start_vllm("prefill", connector=connector)
        self._names = {
            cluster.start_vllm(f"decode_{number}", connector=connector): f"decode_{number}" for number in range(decodes)
        }
        for port, name in {prefill: "prefill", **self._names}.items():
            cluster.wait_ready(name, port)
        self.router = cluster.start_router({prefill: "prefill", **dict.fromkeys(self._names, "decode")}, connector)

    def kill(self, port: int) -> None:
        """Kill a decode instance, and begin to start it again."""
        self._cluster.kill(self._names[port])
        self.kills += 1
        self._cluster.start_vllm(self._names[port], connector=self._connector, port=port)

    def wait_for_two(self) -> None:
        """Wait until two decode instances answer their health checks and are healthy for the router."""
        deadline = time.monotonic() + START_S
        while sum(map(self._serves, self._list_healthy())) < 2:
            if time.monotonic() > deadline:
                fail(f"after {START_S:g} s fewer than two decode instances are healthy")
            time.sleep(0.5)

    def _list_healthy(self) -> list[int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.router}/registered", timeout=30) as answer:
            return [each["port"] for each in json.load(answer)["decode"] if each["state"] == "healthy"]

    def _serves(self, port: int) -> bool:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10),
        ):
            return True
        return False


def read_stream(
    router: int, path: str, prompt: str, tokens: int, on_event: Callable[[int, int], None] = lambda count, decode: None
) -> Stream:
    """Read one greedy stream.

    Args:
        on_event: is called after each event with text, with the number of these events so far and the port of the
            decode instance.
    """
    given = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": MODEL, **given, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{router}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, finishes, usage, is_done, error, count = "", 0, [], False, "", 0
    with urllib.request.urlopen(request, timeout=300) as answer:
        decode = int(answer.headers["x-router-decode"].rpartition(":")[2])
        for line in answer:
            is_done |= line.startswith(b"data: [DONE]")
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                error = str(event["error"])
            if event.get("usage"):
                usage.append(event["usage"]["completion_tokens"])
            for choice in event.get("choices", ()):
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                text, finishes = text + piece, finishes + bool(choice["finish_reason"])
                if piece:
                    count += 1
                    on_event(count, decode)
    return Stream(text, finishes, usage, is_done, error)


def kill_in(fleet: Fleet, path: str, prompt: str, tokens: int, kill_after: int) -> Stream:
    """Read a stream, and kill its decode instance after ``kill_after`` events with text."""

    def kill_at(count: int, decode: int) -> None:
        if count == kill_after:
            fleet.kill(decode)

    return read_stream(fleet.router, path, prompt, tokens, kill_at)


def list_kills(tokens: int, every: int, first: int | None, last: int | None) -> range:
    """Return the numbers of tokens after which decode is killed; end the program if there is none."""
    kills = range(first or every, min(tokens - 1, last or tokens) + 1, every)
    if not kills or kills[0] < 1:
        fail(f"no kill lies within a stream of {tokens} tokens; --from and --to name tokens from 1 to {tokens - 1}")
    return kills


def main() -> None:
    """Start everything and run the checks."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="in each stream; default: 64")
    parser.add_argument("--every", type=int, default=8, metavar="N", help="kill after each N-th token; default: 8")
    parser.add_argument("--from", dest="first", type=int, metavar="N", help="the first kill; default: as --every")
    parser.add_argument("--to", dest="last", type=int, metavar="N", help="no kill after more; default: all")
    parser.add_argument("--path", choices=PATHS, help="by this API only; default: both")
    parser.add_argument("--decodes", type=int, default=3, metavar="N", help="decode instances, 2 or more; default: 3")
    options = parser.parse_args()
    kills = list_kills(options.tokens, options.every, options.first, options.last)
    with scratch(f"run_kills_{options.connector}") as folder, Cluster(folder, find_model(options.model)) as cluster:
        print(
            f"starting instances, connector {options.connector}, which takes minutes; logs are in {folder}", flush=True
        )
        fleet = Fleet(cluster, options.connector, options.decodes)
        wrong = []
        for path in [options.path] if options.path else PATHS:
            for kill_after in kills:
                fleet.wait_for_two()
                prompt = words(PROMPT_WORDS, seed=PATHS.index(path) * 1000 + kill_after)
                whole = read_stream(fleet.router, path, prompt, options.tokens)
                if whole[1:] != (1, [options.tokens], True, ""):
                    fail(f"an undisturbed stream ended with {whole}")
                resumed = kill_in(fleet, path, prompt, options.tokens, kill_after)
                is_equal = resumed == whole
                print(f"{path}, killed after {kill_after} tokens: {'equal' if is_equal else resumed}", flush=True)
                wrong += [] if is_equal else [kill_after]
        resumptions = int(metric(fleet.router, "router_resumptions_total"))
        print(f"{fleet.kills} kills, {resumptions} streams resumed, {fleet.kills - len(wrong)} texts equal")
        if wrong:
            fail(f"{len(wrong)} of {fleet.kills} streams did not end as undisturbed ones")
        if resumptions != fleet.kills:
            fail(f"{fleet.kills} decode instances were killed, but {resumptions} streams resumed")
        print("VERIFIED")


if __name__ == "__main__":
    main()
