"""Check that real vLLM instances on CPU with pipeline stages share blocks, also after one rank's blocks were lost.

    python benchmarks/vllm_stages.py [--prompts 30] [--stages 2] [--ranks 1] [--family llama] [--json FILE]

Run it with a Python that has this project and mooncake_master. The environment variable VLLM names the program ``vllm``
if it is not on the PATH. An instance with stages computes the prompts and ends; another process holds the blocks in the
pool. A second instance with stages then answers the prompts in three parts: the first third with all blocks in the
pool, the second third after some blocks of one rank were removed at random, and the last third after all blocks of this
rank were removed. The program exits with 0 only if all answers equal those of an instance without stages and connector,
and the first third got every whole block from the pool, the second third fewer, and the last third none. ``--ranks`` is
the tensor-parallel size. vLLM's CPU build fails with stages and ``--enforce-eager``, so these instances use a compiler.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "vllm")]

from cluster import Cluster, fail, namespaces, scratch  # noqa: E402
from hybrid_models import FAMILIES  # noqa: E402
from vllm_connector import BLOCK, FIRST_WORD, LAST_WORD, Prompt, blocks, choose_model, ended  # noqa: E402
from vllm_cuts import answer, compare, given, start  # noqa: E402
from vllm_faults import open_evictor, open_owner  # noqa: E402

from kvstore_backend.namespace import key_prefix  # noqa: E402

# vLLM's CPU worker makes the buffers between stages only when it warms up for a compiler.
FLAGS = ("--no-enforce-eager", "-cc.backend=eager")
REMOVED = 48  # number of removed parts, of the 256 parts of a rank's blocks


class Trial:
    """The check of two instances with stages that use one pool.

    Args:
        cluster: the cluster that starts the instances.
        pool: the pool; the instances give no memory to it.
        num_ranks: number of ranks of an instance: stages times tensor-parallel size.
        flags: flags of vLLM for the instances with stages.
        num_prompts: number of prompts, in all three parts together.
    """

    def __init__(self, cluster: Cluster, pool: str, num_ranks: int, flags: Sequence[str], num_prompts: int) -> None:
        self._cluster = cluster
        self._pool = pool
        self._num_ranks = num_ranks
        self._flags = flags
        self._num_prompts = num_prompts
        self._prompts: list[Prompt] = []

    def run(self) -> dict[str, object]:
        """Run the check and return the figures; end the program if a result is wrong."""
        first = self._start("first")
        answers = self._compute(first)
        digests = sorted(namespaces(first))
        if len(digests) != self._num_ranks:
            fail(f"{self._num_ranks} ranks have {len(digests)} namespaces")
        self._cluster.stop("first")
        (plain,) = start(self._cluster, {"plain": ()}, connector=None)
        right = [answer(plain, prompt) for prompt in self._prompts]
        compare(answers, right, "computing")
        self._cluster.stop("plain")
        second = self._start("second")
        lossy = random.Random(7).choice(digests)
        figures: dict[str, object] = {"prompts": len(self._prompts), "ranks": self._num_ranks, "equal": "all"}
        parts = {"nothing": [], "parts": random.Random(8).sample(range(256), REMOVED), "everything": list(range(256))}
        with open_evictor(self._pool) as evictor:
            for turn, kind in enumerate(parts):
                for part in parts[kind]:
                    evictor.clear(f"{key_prefix(lossy)}{part:02x}")
                figures[f"tokens from the pool, {kind} of one rank removed"] = self._load(second, turn, kind, right)
        return figures

    def _start(self, name: str) -> int:
        # As if the other one were a prefill instance: all blocks that the pool has are loaded, even if that is slow.
        (port,) = start(self._cluster, {name: tuple(self._flags)}, pool=self._pool, prefill_wait_s=0.05)
        return int(port)

    def _compute(self, port: int) -> list[list[int]]:
        """Send random prompts, and select those with all blocks saved; return their answers."""
        chooser, answers = random.Random(17), []
        for _ in range(2 * self._num_prompts + 4):
            prompt = chooser.choices(range(FIRST_WORD, LAST_WORD), k=chooser.randint(140, 1500))
            lost, tried = count_lost(port), ended(port, "save")
            generated = answer(port, prompt)
            wait_ended(port, tried + self._num_ranks * (len(prompt) // BLOCK))
            if count_lost(port) == lost:  # else the machine was too busy for the pool's deadlines
                self._prompts.append(prompt)
                answers.append(generated)
            if len(answers) == self._num_prompts:
                break
        else:
            fail(f"only {len(answers)} of {self._num_prompts} prompts were saved within the pool's deadlines")
        return answers

    def _load(self, port: int, turn: int, kind: str, right: Sequence[list[int]]) -> str:
        """Send a third of the prompts, and check the answers and the number of tokens from the pool.

        Args:
            port: the port of the instance.
            turn: the number of the third: 0, 1 or 2.
            kind: the blocks of one rank that were removed before: ``nothing``, ``parts`` or ``everything``.
            right: the right answers to all prompts.

        Returns:
            A text with the number of tokens from the pool.
        """
        mine = slice(turn, None, 3)
        before, failed = given(port), blocks(port, "load", "failed")
        compare([answer(port, prompt) for prompt in self._prompts[mine]], right[mine], f"after {kind} was removed")
        most = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in self._prompts[mine])
        got, failed = int(given(port) - before), int(blocks(port, "load", "failed") - failed)
        if (kind == "nothing" and got != most and not failed) or (kind != "nothing" and got >= most):
            fail(f"{kind} of one rank was removed, and {got} tokens of {most} came from the pool")
        if kind == "everything" and got:
            fail(f"{got} tokens came from the pool, although all blocks of one rank were removed")
        return f"{got} of {most}, {failed} pieces of blocks failed"


def count_lost(port: int) -> float:
    """Return the number of pieces of blocks that an instance's workers could not save."""
    return blocks(port, "save", "failed") + blocks(port, "save", "dropped")


def wait_ended(port: int, at_least: float) -> None:
    """Wait until the saves of ``at_least`` pieces of blocks have ended, and their number has not changed for 0.5 s.

    The number may be higher: a model with several groups of layers has one block in each group for the same tokens.
    """
    deadline, count = time.monotonic() + 60, -1.0
    while count < at_least or ended(port, "save") != count:
        if time.monotonic() > deadline:
            fail("the saves did not end within a minute")
        count = ended(port, "save")
        time.sleep(0.5)


def main() -> None:
    """Start the instances and run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=30, help="number of prompts (default 30)")
    parser.add_argument("--stages", type=int, default=2, help="pipeline-parallel size (default 2)")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="the small random model (default llama)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    flags = ["--pipeline-parallel-size", str(options.stages), "--tensor-parallel-size", str(options.ranks), *FLAGS]
    with scratch("stages") as folder, Cluster(folder, choose_model(options.family)) as cluster:
        pool = cluster.master.pool
        with open_owner(pool):
            pool = pool.replace("global_segment_size=512MiB", "global_segment_size=0")
            figures = Trial(cluster, pool, options.stages * options.ranks, flags, options.prompts).run()
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
