"""Prompts that two real vLLM instances on CPU answer while their pool is broken: none fails, none differs.

    python benchmarks/vllm_faults.py [--prompts 100] [--memory staged] [--json FILE] [--flags="--max-num-seqs 4"]
        [--family gemma3]

Run it with a Python that has this project and mooncake_master; VLLM names vLLM's program where it is not on the PATH.
``--memory staged`` has blocks pass through the stand-in for a GPU's memory. An instance without connector says what is
right, token by token. Then each of two others computes half of the prompts, and answers the half that the other has
computed, four at a time, while in turn blocks are removed as they are read, a process that holds a third of them is
stopped (reads of its memory are given up and end late), and the master is killed, started again, and stopped. In the
end the pool must be in use again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "vllm")]

from cluster import Cluster, fail, namespaces, scratch  # noqa: E402
from vllm_connector import (  # noqa: E402
    Client,
    Prompt,
    blocks,
    choose_model,
    ended,
    make_parser,
    mixed_prompts,
    prompt,
    until,
)

from kvstore_backend.backend import StorageBackend  # noqa: E402
from kvstore_backend.config import read_config  # noqa: E402
from kvstore_backend.namespace import key_prefix  # noqa: E402
from kvstore_backend.pool import open_store  # noqa: E402
from tests.support.peer import Peer  # noqa: E402

REMOVE_EVERY_S = 0.1
HEAL_S = 120.0


class Faults:
    """What happens to the pool, told by the share of prompts that were answered."""

    def __init__(self, cluster: Cluster, owner: Peer, evictor: StorageBackend, digests: Sequence[str]) -> None:
        self._cluster = cluster
        self._owner = owner
        self._evictor = evictor
        # A key goes on with its block's hash, so a prefix with one digit more has a 256th of the blocks.
        self._prefixes = [f"{key_prefix(digest)}{digits:02x}" for digest in digests for digits in range(256)]
        random.Random(5).shuffle(self._prefixes)
        self.answered = 0.0
        self.removals = 0

    async def run(self) -> None:
        """All of them in turn."""
        await self._remove_blocks_until(0.3)
        for share, act in self._plan():
            await self._wait_for(share)
            await asyncio.to_thread(act)

    def _plan(self) -> Sequence[tuple[float, Callable[[], None]]]:
        master = self._cluster.master
        return (
            (0.32, partial(os.kill, self._owner.pid, signal.SIGSTOP)),
            (0.46, partial(os.kill, self._owner.pid, signal.SIGCONT)),
            (0.55, partial(master.send, signal.SIGKILL)),
            (0.65, master.start),
            (0.80, partial(master.send, signal.SIGSTOP)),
            (0.90, partial(master.send, signal.SIGCONT)),
        )

    async def _remove_blocks_until(self, share: float) -> None:
        for prefix in self._prefixes:
            if self.answered >= share:
                return
            await asyncio.to_thread(self._evictor.clear, prefix)
            self.removals += 1
            await asyncio.sleep(REMOVE_EVERY_S)

    async def _wait_for(self, share: float) -> None:
        while self.answered < share:
            await asyncio.sleep(0.01)


class Trial:
    """The prompts, the right answers, and the two instances that are to give them."""

    def __init__(self, cluster: Cluster, ports: Sequence[int], asked: Sequence[Prompt]) -> None:
        self._cluster = cluster
        self._ports = ports
        self._asked = asked
        self._client = Client()

    async def run(self, plain: int) -> dict[str, object]:
        """The figures; ends the program where an answer is missing or differs."""
        truth = await self._client.answers([plain], self._asked)
        self._cluster.stop("plain")
        with _open_owner(self._cluster.master.pool) as owner:
            self._compare("before faults", truth, await self._client.answers(self._ports, self._asked))
            with _open_evictor(self._cluster.master.pool) as evictor:
                digests = sorted(set.union(*map(namespaces, self._ports)))
                faults = Faults(self._cluster, owner, evictor, digests)
                counted = {name: self._count(*name) for name in OPERATIONS}
                answers, _ = await asyncio.gather(self._ask_all(faults), faults.run())
                self._compare("under faults", truth, answers)
                healed = await self._heal()
        return {
            "prompts": len(self._asked),
            "failed": 0,
            "equal": len(self._asked),
            "parts of the pool removed meanwhile": faults.removals,
            **{f"blocks, {' '.join(name)}": self._count(*name) - before for name, before in counted.items()},
            "seconds until the pool was in use again": round(healed, 1),
        }

    async def _ask_all(self, faults: Faults) -> list[list[int] | None]:
        """Each prompt goes to the instance that has not computed it."""
        turn = asyncio.Semaphore(4)

        async def one(number: int) -> list[int] | None:
            async with turn:
                answer = await self._client.answer(self._ports[(number + 1) % 2], self._asked[number])
            faults.answered += 1 / len(self._asked)
            return answer

        return await asyncio.gather(*map(one, range(len(self._asked))))

    async def _heal(self) -> float:
        """Seconds until a prompt that the first instance computes is loaded by the second."""
        start = time.monotonic()
        first, second = self._ports
        for number in range(1000):
            asked = prompt(600, f"healed {number}")
            saved, loaded, tried = blocks(first, "save", "ok"), blocks(second, "load", "ok"), ended(first, "save")
            await self._client.answer(first, asked)
            await until(partial(self._has_saved_more, tried, start), "saving", HEAL_S)
            if blocks(first, "save", "ok") > saved:
                await self._client.answer(second, asked)
                await asyncio.sleep(0.2)
                if blocks(second, "load", "ok") > loaded:
                    break
            if self._is_late(start):
                fail(f"{HEAL_S:g} s after the master went on the second instance loads nothing")
        return time.monotonic() - start

    def _has_saved_more(self, tried: float, start: float) -> bool:
        return ended(self._ports[0], "save") > tried or self._is_late(start)

    @staticmethod
    def _is_late(start: float) -> bool:
        return time.monotonic() > start + HEAL_S

    def _count(self, operation: str, outcome: str) -> float:
        return sum(blocks(port, operation, outcome) for port in self._ports)

    @staticmethod
    def _compare(when: str, truth: Sequence[object], answers: Sequence[object]) -> None:
        failed = list(answers).count(None)
        wrong = sum(one != two for one, two in zip(truth, answers, strict=True)) - failed
        if failed or wrong:
            fail(f"{when} {failed} of {len(truth)} requests failed, and {wrong} answers are wrong")


OPERATIONS = tuple((operation, outcome) for operation in ("load", "save") for outcome in ("ok", "failed", "dropped"))


@contextmanager
def _open_owner(pool: str) -> Iterator[Peer]:
    """A process that gives the pool as much memory as each instance does."""
    config = read_config(pool)
    assert config is not None
    with Peer(partial(open_store, config)) as owner:
        yield owner


@contextmanager
def _open_evictor(pool: str) -> Iterator[StorageBackend]:
    """A client that only removes."""
    config = read_config(pool.replace("global_segment_size=512MiB", "global_segment_size=0"))
    assert config is not None
    store = open_store(config)
    try:
        yield store
    finally:
        store.close()


def main() -> None:
    """Entry point."""
    parser = make_parser(__doc__)
    parser.add_argument("--memory", choices=("staged", "direct"), default="direct", help="of both instances")
    options = parser.parse_args()
    with scratch(f"faults_{options.memory}") as folder, Cluster(folder, choose_model(options.family)) as cluster:
        plain = cluster.start_vllm("plain", *options.flags, connector=None)
        # As if the other were a prefill instance: whatever the pool has is loaded, however long that takes.
        own = {"memory": options.memory, "prefill_wait_s": 0.05}
        ports = {name: cluster.start_vllm(name, *options.flags, **own) for name in ("first", "second")}
        for name, port in {"plain": plain, **ports}.items():
            cluster.wait_ready(name, port)
        trial = Trial(cluster, list(ports.values()), mixed_prompts(options.prompts, "faults"))
        figures = asyncio.run(trial.run(plain))
        print(json.dumps(figures, indent=2))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
