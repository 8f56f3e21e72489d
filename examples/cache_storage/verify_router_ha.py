"""Checks the results of run_router_ha.sh: it kills a router during a stream, and the conversation continues.

``before`` runs turns 1 to 3, and kills router 2 during turn 2. ``after`` runs turn 4 with the restarted router 2, and
prints the table. Exits 0 only if every check succeeds; otherwise 1, with a message about the check that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verify import (
    BLOCK,
    TURNS,
    Message,
    check_keys_are_ours,
    fail,
    print_table,
    shorten,
    wait_for,
    wait_until_saved,
)

QUESTIONS = (*TURNS, "Thank you. Say all of that again in one sentence.")
MAX_TOKENS, MIN_TOKENS = 100, 70  # so that each turn adds at least one block
NUM_INSTANCES = 4
PIECES_BEFORE_KILL = 20
# Exit statuses of curl: the transfer ended early, or the connection broke.
CUT = (18, 52, 56)
HEADS = ("turn", "router", "status", "prompt tokens", "cached tokens", "source", "seconds", "verified")


@dataclass
class Stream:
    """One streamed answer as curl saw it."""

    text: str = ""
    pieces: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_whole: bool = False
    status: int = 0
    curl: int = 0
    seconds: float = 0.0

    @property
    def cached(self) -> int:
        """The number of the prompt's tokens that came from caches."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def source(self) -> str:
        """The numbers of tokens from the own cache and from the pool; "-" if none are known, as with FastDeploy."""
        details = self.usage.get("prompt_tokens_details") or {}
        parts = {"own cache": details.get("own_cached_tokens"), "pool": details.get("pool_cached_tokens")}
        return " + ".join(f"{count} {name}" for name, count in parts.items() if count) or "-"

    def read_line(self, line: str) -> None:
        """Add one line of curl's output."""
        if line.startswith("status "):
            self.status = int(line.split()[1])
            return
        data = line.removeprefix("data: ").strip()
        if data in ("", "[DONE]"):
            self.is_whole |= data == "[DONE]"
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.error = data[:300]  # an incomplete event, from a connection that was cut
            return
        if "choices" not in event:
            self.error = data[:300]
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
        self.pieces += 1


def ask(port: int, messages: list[Message], on_piece: Callable[[Stream], None] = lambda _: None) -> Stream:
    """Send a greedy chat request with curl, and read the stream; call ``on_piece`` after each line."""
    body = {
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "min_tokens": MIN_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    command = ["curl", "-qsN", "--max-time", "600", "-w", "\nstatus %{http_code}\n", "-d", "@-"]
    command += ["-H", "Content-Type: application/json", f"http://127.0.0.1:{port}/v1/chat/completions"]
    stream, start = Stream(), time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdin is not None
        assert curl.stdout is not None
        curl.stdin.write(json.dumps(body))
        curl.stdin.close()
        for line in curl.stdout:
            stream.read_line(line)
            on_piece(stream)
    stream.seconds, stream.curl = time.monotonic() - start, curl.returncode
    return stream


class Conversation:
    """The messages and the table so far. A file stores them between ``before`` and ``after``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._number = 0
        self._messages: list[Message] = []
        self.rows: list[list[object]] = []
        if args.notes.exists():
            notes = json.loads(args.notes.read_text())
            self._number, self._messages, self.rows = notes["number"], notes["messages"], notes["rows"]

    def keep(self) -> None:
        """Write the conversation to the file for the next command."""
        notes = {"number": self._number, "messages": self._messages, "rows": self.rows}
        self._args.notes.write_text(json.dumps(notes))

    def hold_turn(self, *routers: int, kill: int = 0) -> None:
        """Ask the next question through the last of ``routers``, and check the answer.

        With ``kill``, ask it first through the first router, and kill this router's process group during the answer.
        """
        self._messages.append({"role": "user", "content": QUESTIONS[self._number]})
        self._number += 1
        expected = ask(self._args.reference, self._messages)
        if not expected.is_whole or expected.usage["completion_tokens"] < MIN_TOKENS:
            fail(f"the reference did not answer turn {self._number}: {expected}")
        if kill:
            self._ask_and_kill(routers[0], kill, expected)
        self._ask_whole(routers[-1], expected)
        self._messages.append({"role": "assistant", "content": expected.text})

    def _ask_and_kill(self, router: int, kill: int, expected: Stream) -> None:
        killed_at = 0

        def on_piece(stream: Stream) -> None:
            nonlocal killed_at
            if stream.pieces >= PIECES_BEFORE_KILL and not killed_at:
                killed_at = stream.pieces
                os.killpg(kill, signal.SIGKILL)

        stream = self._ask(router, on_piece)
        if not killed_at or stream.is_whole or stream.curl not in CUT:
            fail(f"the kill of router {router + 1} did not interrupt turn {self._number}; curl received {stream}")
        if not stream.text or not expected.text.startswith(stream.text):
            fail(f"the text of turn {self._number} before the kill is wrong: {shorten(stream.text)!r}")
        print(f"  killed (kill -9) after {killed_at} pieces; curl ended with status {stream.curl}", flush=True)
        self._note(router, f"{stream.status}, cut", stream, "the part is right")

    def _ask_whole(self, router: int, expected: Stream) -> None:
        stream = self._ask(router)
        if stream.curl or stream.status != 200 or not stream.is_whole:
            fail(f"router {router + 1} did not answer turn {self._number}: {stream}")
        if stream.text != expected.text:
            fail(
                f"the answer to turn {self._number} differs from that without pool and cache: "
                f"{shorten(stream.text)!r} instead of {shorten(expected.text)!r}"
            )
        if self._number > 1 and stream.cached < BLOCK:
            fail(
                f"turn {self._number} had {stream.cached} cached tokens, but at least one block of {BLOCK} was expected"
            )
        self._note(router, str(stream.status), stream, "yes")
        # The last token was never an input of the model, so it has no KV.
        blocks = (stream.usage["prompt_tokens"] + stream.usage["completion_tokens"] - 1) // BLOCK
        wait_until_saved(self._args.master_metrics, blocks * self._args.keys_per_block, self._args.instances)

    def _ask(self, router: int, on_piece: Callable[[Stream], None] = lambda _: None) -> Stream:
        port = self._args.routers[router]
        print(
            f"turn {self._number}: curl http://127.0.0.1:{port}/v1/chat/completions  (router {router + 1})", flush=True
        )
        return ask(port, self._messages, on_piece)

    def _note(self, router: int, status: str, stream: Stream, verified: str) -> None:
        prompt: object = stream.usage.get("prompt_tokens", "-")
        cached: object = stream.cached if stream.usage else "-"
        row = [self._number, router + 1, status, prompt, cached, stream.source, f"{stream.seconds:.1f}", verified]
        self.rows.append(row)
        print(f"  {status}: {prompt} prompt tokens, {cached} cached;{shorten(stream.text)[:60]}", flush=True)


def list_instances(router: int) -> list[str]:
    """Return the instances that a router counts as healthy."""
    command = ["curl", "-qs", "--max-time", "5", f"http://127.0.0.1:{router}/registered"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout or "{}")
    return sorted(
        f"{role} {each['host_ip']}:{each['port']}"
        for role in ("prefill", "decode")
        for each in listed.get(role, ())
        if each["state"] == "healthy"
    )


def check_fleet(routers: Sequence[int]) -> None:
    """Check that all routers list the same instances as healthy."""

    def listed() -> list[str] | None:
        first, *others = [list_instances(router) for router in routers]
        return first if len(first) == NUM_INSTANCES and all(other == first for other in others) else None

    instances = wait_for(listed, f"the routers at {routers} do not list the same {NUM_INSTANCES} instances")
    print(f"routers {', '.join(map(str, routers))} list: {', '.join(instances)}", flush=True)


def check_nobody_registered(log: Path) -> None:
    """Check that the restarted router got its instances from the shared state.

    It logs each instance that it learns of by a registration.
    """
    new = [line for line in log.read_text(errors="replace").splitlines() if line.endswith(" registered")]
    if new:
        fail(f"the restarted router did not list an instance before the instance registered: {new[0]}")


def main() -> None:
    """Parse the command line and run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=("before", "after"))
    parser.add_argument("--routers", type=int, nargs=2, required=True, help="their ports")
    parser.add_argument("--reference", type=int, required=True, help="port of an instance without pool and cache")
    parser.add_argument("--instances", type=int, nargs="+", required=True)
    parser.add_argument("--master-metrics", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--keys-per-block", type=int, default=1, help="2 if K and V have separate keys")
    parser.add_argument("--kill", type=int, default=0, help="process group of router 2")
    parser.add_argument("--log", type=Path, help="log of router 2 after its restart")
    args = parser.parse_args()
    conversation = Conversation(args)
    if args.part == "before":
        check_fleet(args.routers)
        conversation.hold_turn(0)
        conversation.hold_turn(1, 0, kill=args.kill)
        conversation.hold_turn(0)
        conversation.keep()
        return
    check_fleet(args.routers)
    conversation.hold_turn(1)
    check_nobody_registered(args.log)
    print_table(HEADS, conversation.rows)
    print(
        "verified: every turn got the same answer as without pool and cache, although a router was killed during one;"
    )
    print("          each turn from the second on had cached tokens; both routers list the same four instances, and")
    print("          the restarted router needed no registration for that.")
    check_keys_are_ours(args.master_metrics)


if __name__ == "__main__":
    main()
