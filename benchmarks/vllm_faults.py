"""Check the answers of two real vLLM instances on CPU while their pool has faults: no request fails, no answer differs.

    python benchmarks/vllm_faults.py [--prompts 100] [--memory staged] [--json FILE] [--flags="--max-num-seqs 4"]
        [--family gemma3]

Run it with a Python that has this project and mooncake_master. The environment variable VLLM names the program ``vllm``
if it is not on the PATH. ``--memory staged`` moves blocks through the stand-in for a GPU's memory. An instance without
connector gives the right answers, which are compared token by token. Each of two other instances computes one half of
the prompts, and then answers the half that the other one computed, four prompts at a time. Meanwhile these faults
happen one after the other: blocks are removed during reads; a process that holds a third of the blocks is suspended, so
that reads of its memory are given up and end late; the master is killed, started again, and suspended. In the end, the
instances must use the pool again.
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

from cluster import Cluster, fail, metric, namespaces, scratch  # noqa: E402
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
    """The faults of the pool. Each happens when a certain share of the prompts has been answered."""

    def __init__(self, cluster: Cluster, owner: Peer, evictor: StorageBackend, digests: Sequence[str]) -> None:
        self._cluster = cluster
        self._owner = owner
        self._evictor = evictor
        # After the prefix, a key has its block's hash in hexadecimal: two digits more select a 256th of the blocks.
        self._prefixes = [f"{key_prefix(digest)}{digits:02x}" for digest in digests for digits in range(256)]
        random.Random(5).shuffle(self._prefixes)
        self.answered = 0.0
        self.removals = 0

    async def run(self) -> None:
        """Run all faults one after the other."""
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
    """The check of two instances with all prompts.

    Args:
        cluster: the cluster of the instances.
        ports: the ports of the two instances.
        asked: the prompts.
    """

    def __init__(self, cluster: Cluster, ports: Sequence[int], asked: Sequence[Prompt]) -> None:
        self._cluster = cluster
        self._ports = ports
        self._asked = asked
        self._client = Client()

    async def run(self, plain: int) -> dict[str, object]:
        """Run the check and return the figures; end the program if an answer is missing or differs.

        Args:
            plain: port of the instance without connector.
        """
        truth = await self._client.answers([plain], self._asked)
        self._cluster.stop("plain")
        with open_owner(self._cluster.master.pool) as owner:
            self._compare("before faults", truth, await self._client.answers(self._ports, self._asked))
            with open_evictor(self._cluster.master.pool) as evictor:
                digests = sorted(set.union(*map(namespaces, self._ports)))
                faults = Faults(self._cluster, owner, evictor, digests)
                counted = {name: self._count(*name) for name in OPERATIONS}
                lacking = self._count_lacking()
                answers, _ = await asyncio.gather(self._ask_all(faults), faults.run())
                self._compare("under faults", truth, answers)
                healed = await self._heal()
        return {
            "prompts": len(self._asked),
            "failed": 0,
            "equal": len(self._asked),
            "parts of the pool removed meanwhile": faults.removals,
            **{f"blocks, {' '.join(name)}": self._count(*name) - before for name, before in counted.items()},
            "blocks that one group of layers lacked, so that a hit was shorter": self._count_lacking() - lacking,
            "seconds until the pool was in use again": round(healed, 1),
        }

    async def _ask_all(self, faults: Faults) -> list[list[int] | None]:
        """Send each prompt to the instance that has not computed it; return all answers."""
        turn = asyncio.Semaphore(4)

        async def one(number: int) -> list[int] | None:
            async with turn:
                answer = await self._client.answer(self._ports[(number + 1) % 2], self._asked[number])
            faults.answered += 1 / len(self._asked)
            return answer

        return await asyncio.gather(*map(one, range(len(self._asked))))

    async def _heal(self) -> float:
        """Wait until the second instance loads a new prompt that the first one computed; return the seconds."""
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

    def _count_lacking(self) -> float:
        return sum(metric(port, "vllm:kvstore_group_blocks_missing_total") for port in self._ports)

    @staticmethod
    def _compare(when: str, truth: Sequence[object], answers: Sequence[object]) -> None:
        failed = list(answers).count(None)
        wrong = sum(one != two for one, two in zip(truth, answers, strict=True)) - failed
        if failed or wrong:
            fail(f"{when} {failed} of {len(truth)} requests failed, and {wrong} answers are wrong")


OPERATIONS = tuple((operation, outcome) for operation in ("load", "save") for outcome in ("ok", "failed", "dropped"))


@contextmanager
def open_owner(pool: str) -> Iterator[Peer]:
    """Run a process that gives the pool as much memory as each instance does."""
    config = read_config(pool)
    assert config is not None
    with Peer(partial(open_store, config)) as owner:
        yield owner


@contextmanager
def open_evictor(pool: str) -> Iterator[StorageBackend]:
    """Open a client of the pool that gives no memory; it is used to remove blocks."""
    config = read_config(pool.replace("global_segment_size=512MiB", "global_segment_size=0"))
    assert config is not None
    store = open_store(config)
    try:
        yield store
    finally:
        store.close()


def main() -> None:
    """Start the instances, run the check and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--memory", choices=("staged", "direct"), default="direct", help="memory of both instances")
    options = parser.parse_args()
    with scratch(f"faults_{options.memory}") as folder, Cluster(folder, choose_model(options.family)) as cluster:
        plain = cluster.start_vllm("plain", *options.flags, connector=None)
        # As if the other one were a prefill instance: all blocks that the pool has are loaded, even if that is slow.
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
