"""scripts/simulate-faults: runs seeds of a world, shows one seed as a timeline, or shrinks its plan.

Each seed runs in its own child process, forked after all imports. State that a run leaves in modules ends with the
child.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from simulation.world import Event, Failure, Outcome, Plan, World, run_world

__all__ = ["REGRESSIONS", "find_world", "main", "run_all", "run_forked", "shrink"]

WORLDS = {
    "router": "simulation.router_world:RouterWorld",
    "fleet": "simulation.fleet_world:FleetWorld",
    "pool": "simulation.pool_world:PoolWorld",
    "pair": "simulation.pair_world:PairWorld",
}
REGRESSIONS = Path(__file__).parent / "regressions.txt"
# A run that takes more CPU time than this counts as hung.
HANG_SECONDS = 60
ADDR_NO_RANDOMIZE = 0x0040000

Job = tuple[type[World], int, "Plan | None"]


def find_world(name: str) -> type[World]:
    """Return the class of a world."""
    module, _, attribute = WORLDS[name].partition(":")
    kind: type[World] = getattr(importlib.import_module(module), attribute)
    return kind


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds of a world; return 1 if a seed failed."""
    _fix_hashes()
    arguments = _read_arguments(argv)
    if arguments.regressions:
        return _report(run_all(list(read_regressions(REGRESSIONS)), arguments.jobs), arguments)
    kind = find_world(arguments.world)
    if arguments.shrink is not None:
        return _shrink_and_show(kind, arguments.shrink)
    plan = None
    if arguments.replay:
        from simulation.replay import RecordingError, read_plan  # which load the router

        arguments.seed, arguments.trace = arguments.seed or 0, True
        try:
            plan = read_plan(arguments.replay)
        except RecordingError as exc:
            print(f"scripts/simulate-faults: {exc}", file=sys.stderr)
            return 1
    if arguments.seed is not None:
        (outcome,) = run_all([(kind, arguments.seed, plan)], 1)
        if arguments.trace:
            sys.stdout.write(outcome.trace)
        return _report([outcome], arguments)
    first = _first_of_commit() if arguments.first is None else arguments.first
    seeds: Iterable[int] = range(first, first + arguments.seeds) if arguments.seeds else _forever(first)
    give_up_at = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    return _report(run_all(((kind, seed, None) for seed in seeds), arguments.jobs, give_up_at), arguments)


def _read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate-faults", description=main.__doc__)
    parser.add_argument("--world", choices=WORLDS, default="router")
    parser.add_argument("--seeds", type=int, default=0, help="number of seeds to run")
    parser.add_argument("--minutes", type=float, default=0.0, help="run new seeds for this time")
    parser.add_argument(
        "--first",
        type=int,
        help="the first seed; by default one that depends on the commit, or without git on the time",
    )
    parser.add_argument("--seed", type=int, help="run this seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print its timeline")
    parser.add_argument(
        "--replay",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run the log of a router's flight recorder as a world of the router, and print its timeline",
    )
    parser.add_argument("--shrink", type=int, metavar="SEED", help="find fewer events with the same failure")
    parser.add_argument("--regressions", action="store_true", help="run the seeds of simulation/regressions.txt")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="children at once")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    arguments = parser.parse_args(argv)
    if arguments.replay and arguments.world != "router":
        parser.error("--replay runs the world router")
    if not (arguments.seeds or arguments.minutes):
        arguments.seeds = 100
    return arguments


def _first_of_commit() -> int:
    """Return a first seed that depends on the commit, so that a failure in CI can be repeated."""
    described = subprocess.run(
        ["git", "rev-parse", "--short=6", "HEAD"], cwd=REGRESSIONS.parent, capture_output=True, text=True, check=False
    )
    return int(described.stdout, 16) * 1000 if described.returncode == 0 else int(time.time()) * 1000


def _forever(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1


def read_regressions(path: Path) -> Iterator[Job]:
    """Yield the jobs of a file with lines ``world seed  # defect``."""
    for line in path.read_text().splitlines():
        if fields := line.partition("#")[0].split():
            yield find_world(fields[0]), int(fields[1]), None


def _report(outcomes: Iterable[Outcome], arguments: argparse.Namespace) -> int:
    began, count, failed = time.monotonic(), 0, 0
    virtual = real = 0.0
    oracles: Counter[str] = Counter()
    for outcome in outcomes:
        count += 1
        virtual += outcome.virtual_seconds
        real += outcome.real_seconds
        if outcome.failures:
            failed += 1
            oracles.update({failure.oracle for failure in outcome.failures})
            others = len(outcome.failures) - 1
            more = f" (and {others} more)" if others else ""
            at = f"after {time.monotonic() - began:.1f} s"
            print(f"{outcome.world} {outcome.seed}: {outcome.failures[0]}{more} {at}", flush=True)
            if arguments.seed is None:
                print(f"  scripts/simulate-faults --world {outcome.world} --seed {outcome.seed} --trace", flush=True)
            if arguments.stop:
                break
    seconds = time.monotonic() - began
    print(
        f"{count} seeds in {seconds:.1f} s, {failed} failed {dict(oracles) if failed else ''}; "
        f"{virtual:.0f} virtual seconds, {virtual / max(real, 1e-9):.0f} for each real second of a core",
        file=sys.stderr if arguments.trace else sys.stdout,
    )
    return 1 if failed else 0


def _shrink_and_show(kind: type[World], seed: int) -> int:
    (outcome,) = run_all([(kind, seed, None)], 1)
    if not outcome.failures:
        print(f"{outcome.world} {seed} does not fail")
        return 0
    small = shrink(kind, outcome)
    sys.stdout.write(small.trace)
    print(f"{len(outcome.plan.events)} events shrunk to {len(small.plan.events)}: {small.failures[0]}")
    for event in small.plan.events:
        print(f"  {event.at:.3f} {event}")
    return 1


def shrink(kind: type[World], outcome: Outcome) -> Outcome:
    """Return a run with the same failure and fewer events, by Zeller's ddmin; every remaining event is necessary."""
    oracle, best = outcome.failures[0].oracle, outcome
    parts = 2
    while len(best.plan.events) > 1:
        events = best.plan.events
        size = -(-len(events) // parts)
        candidates: list[list[Event]] = [
            events[:start] + events[start + size :] for start in range(0, len(events), size)
        ]
        jobs: list[Job] = [(kind, outcome.seed, best.plan.keep(rest)) for rest in candidates if rest]
        smaller = None
        for run in run_all(jobs, os.cpu_count() or 1):
            if any(failure.oracle == oracle for failure in run.failures):
                smaller = run
                break
        if smaller is not None:
            best, parts = smaller, max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(events), 2 * parts)
    return best


def run_all(jobs: Iterable[Job], count: int, give_up_at: float | None = None) -> Iterator[Outcome]:
    """Run each job in its own child process, at most ``count`` at once; yield each outcome when its run ends.

    No job begins after ``give_up_at``.
    """
    waiting = iter(jobs)
    selector = selectors.DefaultSelector()
    children: dict[int, tuple[int, Job, float]] = {}
    collected: dict[int, list[bytes]] = {}
    is_over = False
    try:
        while True:
            while not is_over and len(children) < count:
                job = next(waiting, None)
                if job is None or (give_up_at is not None and time.monotonic() > give_up_at):
                    is_over = True
                    break
                reading, pid = _fork(job)
                children[reading], collected[reading] = (pid, job, time.monotonic()), []
                selector.register(reading, selectors.EVENT_READ)
            if not children:
                return
            for key, _ in selector.select(5.0):
                if piece := os.read(key.fd, 1 << 20):
                    collected[key.fd].append(piece)
                    continue
                pid, job, began = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                yield _read_outcome(job, b"".join(collected.pop(key.fd)), status, time.monotonic() - began)
    finally:
        for pid, _, _ in children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_forked(kind: type[World], seed: int, plan: Plan | None = None) -> Outcome:
    """Run one seed in a child process."""
    (outcome,) = run_all([(kind, seed, plan)], 1)
    return outcome


def _fork(job: Job) -> tuple[int, int]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    pid = os.fork()
    if pid:
        os.close(writing)
        return reading, pid
    os.close(reading)
    status = 1
    try:
        faulthandler.register(signal.SIGPROF, chain=True)  # prints a traceback; then the signal ends the child
        signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
        outcome = run_world(*job)
        with os.fdopen(writing, "wb") as pipe:
            _send(pipe, outcome)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _send(pipe: IO[bytes], outcome: Outcome) -> None:
    pickle.dump(outcome, pipe)


def _read_outcome(job: Job, data: bytes, status: int, seconds: float) -> Outcome:
    kind, seed, plan = job
    if data:
        outcome: Outcome = pickle.loads(data)
        return outcome
    failure = Failure("simulator", f"the run hung or crashed (status {status})")
    return Outcome(kind.name, seed, [failure], plan or Plan({}, []), "", 0.0, seconds)


def _fix_hashes() -> None:
    """Start the program again with fixed hashes of strings and fixed addresses, so that sets have one order."""
    if os.environ.get("PYTHONHASHSEED") == "0":
        return
    os.environ["PYTHONHASHSEED"] = "0"
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
    os.execv(sys.executable, [sys.executable, "-m", "simulation.run", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
