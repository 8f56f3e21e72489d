"""Checks the results of run_ha.sh: it kills the leader of the pool's masters, and the pool works with a new leader.

Exits 0 only if every check succeeds; otherwise 1, with a message about the check that failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from verify import (
    BLOCK,
    MAX_TOKENS,
    MIN_TOKENS,
    TURNS,
    Answer,
    Cached,
    Message,
    ask,
    check_keys_are_ours,
    fail,
    logged,
    pool_keys,
    print_table,
    prompt,
    shorten,
    wait_for,
)

STORED_SEEDS = (101, 102, 103)
HEALING = 90.0  # seconds from the leader's end until instances must share blocks through the pool again


class Master(NamedTuple):
    """One of the masters: the port that reports its role, and its process."""

    metrics_port: int
    pid: int

    def serves(self) -> bool:
        """Return whether this master is the leader and accepts calls; False also if it does not answer."""
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        answer = subprocess.run(["curl", "-qs", "--max-time", "2", url], capture_output=True, text=True, check=False)
        try:
            health = json.loads(answer.stdout)
        except ValueError:
            return False
        return health["role"] == "leader" and bool(health["service_ready"])


class Check:
    """The two instances to check, and the table of the requests that they answered."""

    def __init__(self, ports: Sequence[int], logs: Sequence[Path], keys_per_block: int) -> None:
        self._ports = ports
        self._logs = logs
        self._keys_per_block = keys_per_block
        self.rows: list[Sequence[object]] = []

    def ask(self, instance: int, name: str, messages: list[Message], **limits: int) -> tuple[Answer, Cached]:
        """Send a request to an instance, and add to the table how many of its tokens came from caches."""
        answer = ask(self._ports[instance], messages, **limits)
        found = logged(self._logs[instance], answer)
        computed = answer.prompt_tokens - found.own - found.pool
        first_token = f"{answer.seconds * 1000:.0f} ms"
        self.rows.append(
            (f"instance {instance}, {name}", answer.prompt_tokens, found.own, found.pool, computed, first_token)
        )
        print(f"  {self.rows[-1][0]}: {found.pool} tokens from the pool;{shorten(answer.text)[:60]}", flush=True)
        return answer, found

    def is_shared(self, seed: int, leader: Master, name: str, seconds: float) -> bool:
        """Let instance 0 compute a new prompt; return whether instance 1 then reads it from the pool."""
        stored = self.store(seed, leader, name, seconds)
        return stored is not None and self.is_read(seed, stored, name)

    def store(self, seed: int, leader: Master, name: str, seconds: float) -> Answer | None:
        """Let instance 0 compute a prompt, and wait until the pool has the prompt's blocks.

        Returns:
            The answer, or None if the pool does not have the blocks within ``seconds``.
        """
        keys = pool_keys(leader.metrics_port)
        first, _ = self.ask(0, name, [{"role": "user", "content": prompt(seed)}], max_tokens=20)
        blocks = (first.prompt_tokens - 1) // BLOCK
        give_up = time.monotonic() + seconds
        while pool_keys(leader.metrics_port) < keys + blocks * self._keys_per_block:
            if time.monotonic() > give_up:
                return None
            time.sleep(0.05)
        return first

    def is_read(self, seed: int, first: Answer, name: str) -> bool:
        """Return whether instance 1 reads from the pool a prompt that instance 0 computed.

        A different answer ends the program.
        """
        second, found = self.ask(1, name, [{"role": "user", "content": prompt(seed)}], max_tokens=20)
        if second.text != first.text:
            fail(f"the answers of instance 1 and instance 0 to {name} differ")
        return found.pool >= (first.prompt_tokens - 1) // BLOCK * BLOCK


def conversation(check: Check, leader: Master) -> None:
    """Hold the conversation, alternately with both instances, and kill the leader during the second answer."""
    messages: list[Message] = []
    for number, question in enumerate(TURNS):
        messages.append({"role": "user", "content": question})
        killer = threading.Timer(0.3, os.kill, (leader.pid, signal.SIGKILL)) if number == 1 else None
        if killer:
            print(f"turn 2: the leader (pid {leader.pid}) is killed during the answer", flush=True)
            killer.start()
        answer, _ = check.ask(number % 2, f"turn {number + 1}", messages, max_tokens=MAX_TOKENS, min_tokens=MIN_TOKENS)
        if killer:
            killer.join()
        if answer.completion_tokens < MIN_TOKENS:
            fail(f"the answer to turn {number + 1} has {answer.completion_tokens} tokens, not at least {MIN_TOKENS}")
        messages.append({"role": "assistant", "content": answer.text})


def failover(check: Check, masters: Sequence[Master]) -> None:
    """Kill the leader during a conversation; check that the instances share a new prompt through the next leader."""

    def leading() -> Master | None:
        return next((master for master in masters if master.serves()), None)

    old = wait_for(leading, "none of the masters is the leader")
    print(f"the master with metrics on port {old.metrics_port} is the leader", flush=True)
    seeds_before, seeds_after = range(1, 4), itertools.count(4)
    # A single miss is no error: on a busy machine, a look-up may exceed its deadline, which counts as a miss, too.
    if not any(check.is_shared(seed, old, "a new prompt", seconds=30) for seed in seeds_before):
        fail("before the kill, instance 1 loaded no prompt from the pool that instance 0 had computed")
    stored = {seed: check.store(seed, old, "an earlier prompt", seconds=30) for seed in STORED_SEEDS}
    conversation(check, old)
    killed = time.monotonic()
    new = wait_for(lambda: None if (now := leading()) == old else now, "no other master became the leader")
    print(f"the master with metrics on port {new.metrics_port} is the new leader", flush=True)
    for number, seed in enumerate(seeds_after, 1):
        # Instances mount their memory at the new leader some time later; until then, saves are dropped.
        if check.is_shared(seed, new, f"new prompt {number}", seconds=10):
            break
        if time.monotonic() > killed + HEALING:
            print_table(HEADS, check.rows)
            fail(f"no new prompt was shared through the new leader within {HEALING:.0f} s")
    if not any(first and check.is_read(seed, first, "an earlier prompt") for seed, first in stored.items()):
        print_table(HEADS, check.rows)
        fail("after the kill, instance 1 loaded no prompt from the pool that was stored before it")
    print_table(HEADS, check.rows)
    print(
        "verified: every turn got its answer, although the leader was killed during one; afterwards, instance 1 loaded"
    )
    print("          a new prompt from the pool that instance 0 had computed, through the new leader.")
    print("          It also loaded a prompt that was stored before the kill.")
    check_keys_are_ours(new.metrics_port)


HEADS = ("request", "prompt tokens", "own cache", "pool", "computed", "first token")


def main() -> None:
    """Parse the command line and run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ports", type=int, nargs=2, required=True)
    parser.add_argument("--logs", type=Path, nargs=2, required=True)
    parser.add_argument("--masters", nargs="+", required=True, help="each as METRICS_PORT:PID")
    parser.add_argument("--keys-per-block", type=int, default=1, help="2 if K and V have separate keys")
    args = parser.parse_args()
    masters = [Master(*map(int, each.split(":"))) for each in args.masters]
    failover(Check(args.ports, args.logs, args.keys_per_block), masters)


if __name__ == "__main__":
    main()
