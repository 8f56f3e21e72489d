"""Put old defects back, one at a time, and measure how long seeds take to find each one.

    python -m simulation.put_back [NAME ...]

Each defect is put back in a temporary copy of the checkout, where new seeds of its world run until one fails; a seed
counts only if it passes without the defect. The limit is processor time, ten minutes of two processors, so that other
load of the machine changes nothing. ``docs/simulation.md`` has the table.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "kvcommon", "kvstore_backend", "router", "simulation")
LIMIT_SECONDS = 2 * 600.0


class Defect(NamedTuple):
    """One defect: ``old`` in ``file`` is replaced by ``new``.

    Attributes:
        area: ``retry``, ``resumption``, ``transfers``, ``hand-over`` or ``sharing``.
        commit: the commit that fixed it; ``""``: a mutation, which the code never had.
        effect: what goes wrong, and "race" if that depends on the order of events.
    """

    name: str
    area: str
    world: str
    commit: str
    effect: str
    file: str
    old: str
    new: str


DEFECTS = (
    # Retry.
    Defect(
        "same-id-again",
        "retry",
        "router",
        "36b3e6e",
        "race: an attempt has the id of the one before, which its engine may still run",
        "router/serving/retry_loop.py",
        '            request_id += f"-retry{self.number}"\n',
        "            pass\n",
    ),
    Defect(
        "third-death",
        "retry",
        "router",
        "04bb9e4",
        "race: both instances of a pair die, and only the one that is noticed first counts",
        "router/serving/retry_loop.py",
        "                await self.current.await_prefill_end()\n"
        "            # Each death counts once, also if the next attempt fails before it has an ``Attempt``.\n"
        "            deaths, self.current.deaths = max(deaths, self.current.deaths), 0\n",
        "                pass\n",
    ),
    Defect(
        "aborted-again",
        "retry",
        "router",
        "73c62ec",
        "race: a request that its client aborted is sent to another instance",
        "router/serving/proxy.py",
        "        self._retry_loop.is_aborted = True\n",
        "",
    ),
    Defect(
        "stale-connection",
        "retry",
        "router",
        "543a12a",
        "race: an instance that closes an idle connection as it is used counts as failed",
        "router/serving/attempt.py",
        "is_stale=isinstance(error, StaleConnection)",
        "is_stale=False",
    ),
    # Resumption.
    Defect(
        "half-character",
        "resumption",
        "router",
        "d880d75",
        "a stream goes on behind a token that ends within a character",
        "router/serving/resume/stream.py",
        "        return self._shown[-_DOUBTFUL_IDS:] if self._last_count > 1 and not self._is_finished else []\n",
        "        return []\n",
    ),
    Defect(
        "held-ids",
        "resumption",
        "router",
        "f49c3d1",
        "tokens that an instance held back when it preempted are counted again",
        "router/serving/resume/stream.py",
        "        self._segment += 1\n        self._held.clear()\n",
        "        self._segment += 1\n",
    ),
    Defect(
        "one-token-more",
        "resumption",
        "router",
        "",
        "a stream that has all its tokens and lacks only its end is resumed for one token more",
        "router/serving/resume/stream.py",
        "        return self._is_finished or (is_at_limit and not self.doubtful_ids)\n",
        "        return self._is_finished\n",
    ),
    Defect(
        "resent-as-prompt",
        "resumption",
        "router",
        "",
        "the usage of a resumed stream counts the tokens before the break as prompt",
        "router/serving/resume/stream.py",
        "        self._withheld.clear()\n        self._resent = len(self._shown)\n",
        "        self._withheld.clear()\n",
    ),
    # Transfers.
    Defect(
        "used-while-late",
        "transfers",
        "pair",
        "a496d36",
        "race: a sequence goes on in blocks to which a load that was given up may still write",
        "engine/pool/pool_connector.py",
        "usable=outcome.is_released)",
        "usable=True)",
    ),
    Defect(
        "window-back-early",
        "transfers",
        "pool",
        "d9b8be7",
        "race: the memory of a call that was given up is used for something else",
        "kvstore_backend/transfers.py",
        "        if not may_be_late or self._pool.wait_for_late_calls(0):\n",
        "        if True:\n",
    ),
    Defect(
        "removed-before-written",
        "transfers",
        "pair",
        "6abbe94",
        "race: blocks that hold no numbers are removed from the pool before they are written to it",
        "kvstore_backend/transfers.py",
        "            self._pool.flush_writes(_FLUSH_SECONDS)\n            statuses",
        "            statuses",
    ),
    Defect(
        "queued-call-late",
        "transfers",
        "pool",
        "e6f602b",
        "race: a call that was given up before it began runs nevertheless",
        "kvstore_backend/wrappers/guarded.py",
        "                if call.is_given_up:\n                    continue\n",
        "",
    ),
    # Hand-over.
    Defect(
        "reservation-of-gone",
        "hand-over",
        "pair",
        "f25afd9",
        "race: blocks that were reserved for a request that has just ended are never released",
        "engine/disaggregation/memory.py",
        "            if answered.done() and not answered.cancelled() and (reservation := answered.result()):\n"
        "                self.cancel_reservation(reservation, clear=False)\n",
        "",
    ),
    Defect(
        "result-cancelled",
        "hand-over",
        "pair",
        "c00d23f",
        "race: a request that ends while it waits for its prompt cancels what prefill's connection sets",
        "engine/disaggregation/decode.py",
        "        result = await asyncio.shield(self._result)\n",
        "        result = await self._result\n",
    ),
    Defect(
        "lent-blocks-reused",
        "hand-over",
        "pair",
        "685cb90",
        "race: decode uses blocks again to which prefill still writes",
        "engine/disaggregation/decode.py",
        "        seconds = handover.late_seconds\n"
        "        if seconds is None:\n"
        "            seconds = await _wait_for_stop(reader)\n",
        "        seconds = 0.0\n",
    ),
    Defect(
        "queued-after-end",
        "hand-over",
        "pair",
        "bac7fd3",
        "race: blocks that are computed when the hand-over is over are never released",
        "engine/disaggregation/prefill.py",
        "        if self._is_over:\n            self._drop_queue()\n        self._queued.set()\n",
        "        self._queued.set()\n",
    ),
    # Sharing.
    Defect(
        "unsent-lost",
        "sharing",
        "fleet",
        "d3a1a13",
        "race: messages that were being sent when Redis went away are lost, and no missing number shows it",
        "router/sharing/shared_state.py",
        "            self._waiting = deque([*batch, *self._waiting], MAX_WAITING)\n            raise\n",
        "            self._num_batches -= 1\n            raise\n",
    ),
    Defect(
        "slot-of-cancelled",
        "sharing",
        "fleet",
        "1fc854c",
        "race: a request that ends as the supervisor admits it is counted for ever",
        "router/sharing/link.py",
        "self._entering.get(number), refusal) and refusal is None:",
        "self._entering.get(number), refusal) and False:",
    ),
    Defect(
        "slots-of-dead-worker",
        "sharing",
        "fleet",
        "1fc854c",
        "requests of a worker that died are counted for ever",
        "router/sharing/admission_server.py",
        "            for _ in range(count):\n                self._admission.leave(client)\n",
        "            pass\n",
    ),
    Defect(
        "load-of-dead-worker",
        "sharing",
        "fleet",
        "d120c48",
        "the load of a worker that died stays with its instances",
        "router/sharing/load_sync.py",
        "            link.subscribe_to_departures(self._forget_process)\n",
        "",
    ),
)


class Found(NamedTuple):
    """The result of a search; without a ``seed``, it found nothing."""

    seed: int | None
    oracle: str
    seconds: float
    cpu_seconds: float
    num_seeds: int


def main(argv: Sequence[str] | None = None) -> int:
    """Search for defects; return 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m simulation.put_back", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects; not given: all")
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    parser.add_argument("--cpu-seconds", type=float, default=LIMIT_SECONDS, help="the limit for each defect")
    parser.add_argument("--jobs", type=int, default=2, help="children at a time")
    arguments = parser.parse_args(argv)
    chosen = [each for each in DEFECTS if not arguments.names or each.name in arguments.names]
    if unknown := set(arguments.names) - {each.name for each in chosen}:
        parser.error(f"there is no defect {', '.join(sorted(unknown))}; there are {', '.join(d.name for d in DEFECTS)}")
    num_found = 0
    for defect in chosen:
        found = _search(defect, arguments.first, arguments.cpu_seconds, arguments.jobs)
        num_found += found.seed is not None
        outcome = f"{found.seed} | {found.oracle}" if found.seed is not None else "not found | "
        print(
            f"| {defect.area} | {defect.name} | {defect.commit or 'mutation'} | {defect.world} | {outcome} | "
            f"{found.seconds:.0f} | {found.cpu_seconds:.0f} | {found.num_seeds or '-'} |",
            flush=True,
        )
    print(f"{num_found} of {len(chosen)} found")
    return int(num_found < len(chosen))


def _search(defect: Defect, first: int, cpu_limit: float, jobs: int) -> Found:
    began, spent, begin = time.monotonic(), 0.0, first
    with tempfile.TemporaryDirectory(prefix="put-back-") as folder:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__"))
        _put_back(defect, Path(folder) / defect.file)
        while spent < cpu_limit:
            found, cpu_seconds, num_seeds = _run_seeds(Path(folder), defect.world, begin, cpu_limit - spent, jobs)
            spent += cpu_seconds
            begin += num_seeds
            if found is None:
                continue
            seed, oracle = found
            if not _fails_anyway(defect.world, seed):
                return Found(seed, oracle, time.monotonic() - began, spent, begin - first)
            print(f"{defect.world} {seed} fails without {defect.name}, too: {oracle}", file=sys.stderr, flush=True)
            begin = max(begin, seed + 1)
    return Found(None, "", time.monotonic() - began, spent, begin - first)


def _put_back(defect: Defect, file: Path) -> None:
    text = file.read_text()
    if text.count(defect.old) != 1:
        sys.exit(f"{defect.name}: {defect.file} has {text.count(defect.old)} places for it, not one: correct DEFECTS")
    file.write_text(text.replace(defect.old, defect.new))


def _run_seeds(
    folder: Path, world: str, first: int, cpu_limit: float, jobs: int
) -> tuple[tuple[int, str] | None, float, int]:
    """Run seeds until one fails; return this seed and the rule that it breaks, the CPU seconds, and how many ran."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ["--world", world, "--first", str(first), "--minutes", "600", "--jobs", str(jobs), "--stop"]
    with subprocess.Popen(
        [sys.executable, "-m", "simulation.run", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as runner:
        assert runner.stdout is not None
        spent = 0.0
        while runner.poll() is None:
            time.sleep(0.2)
            spent = max(spent, sum(_read_cpu_seconds(runner.pid)))
            if spent > cpu_limit:
                os.killpg(runner.pid, 9)
        lines = runner.stdout.read().splitlines()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    failed = next(((int(found[1]), found[2]) for line in lines if (found := _FAILURE.match(line))), None)
    counted = next((int(line.split()[0]) for line in lines if " seeds in " in line), 0)
    return failed, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, counted


_FAILURE = re.compile(r"\w+ (\d+): ([\w-]+):")


def _read_cpu_seconds(pid: int) -> tuple[float, ...]:
    """Return the CPU seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return (0.0,)
    return tuple(int(each) / os.sysconf("SC_CLK_TCK") for each in fields[11:15])


def _fails_anyway(world: str, seed: int) -> bool:
    command = [sys.executable, "-m", "simulation.run", "--world", world, "--seed", str(seed)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
