"""Measure the cost of our router with all features on, against sglang-router, smg, vllm-router and no router.

    python benchmarks/router_overhead.py --peers-venv /tmp/peers [--quick] [--workers 1 --workers 2] [--json FILE]
    python benchmarks/router_overhead.py --only ours --workers 1 --mode pd --case small --connections 32 --seconds 5

All systems get the same mock instances (2 prefill + 2 decode, then 4, 64 and 256 mixed; ``native/worker.c``) and the
same load (``native/load.c``) over keep-alive connections. Both programs are compiled at the start. Each case is
measured with all systems in turn, in several rounds; figures are medians. "Direct" is the load without a router, at the
instances that answer (in P/D mode the decode instances); "+" is the difference of a system from that. "Stall" is the
time between a stream's last event and the end of its answer: Nagle's algorithm together with delayed acknowledgements
would take 40 ms there.

Our router is measured with 1, 2 and 4 workers ("ours", "ours x2", "ours x4"; ``--workers``). The bars at the end apply
to two workers on two cores, or to the first measured number of workers if two were not measured.

Fairness. Our router runs with its defaults: both legs supervised, health probes, metrics, load-aware policies,
heartbeats every 5 s. The peers get their fastest flags: only errors logged, no retries, no circuit breaker, and
round_robin instead of their default, cache_aware, which keeps a tree of prompts. The modes ``prefix4`` to ``prefix256``
are for cache_aware. sglang-router and smg send both legs at once, as ours does; vllm-router's P/D waits for the prefill
leg's answer before it sends the decode leg. No process is pinned to a core. Router, instances and load share the cores,
so that requests per second depend on all three. CPU per request (user and system time of all threads and processes of
the router, from /proc) varies less. The table shows the CPU of load and instances: if they use most of a core, they
limit the figures, too. "Others" are other processes, the kernel, and time that the host of a virtual machine took: if
this figure is large, repeat the measurement.

``--table`` writes the modes ``prefix4`` to ``prefix256`` as a table for ``scripts/results``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from describe_run import describe_run  # noqa: E402

from tests.support.beside import working_beside  # noqa: E402
from tests.support.registration import registration_fields  # noqa: E402

NATIVE = Path(__file__).with_name("native")
ROOT = NATIVE.parent.parent
# Each peer is started by its module, because two of the packages install a command called smg.
PEERS = {
    "sglang-router": ("sglang_router.launch_router",),
    "smg": ("smg", "launch"),
    "vllm-router": ("vllm_router.launch_router",),
}
NUMBERS_OF_WORKERS = (1, 2, 4)
WORKERS_OF_THE_BARS = 2
# Modes in which the peers also choose the instance by the prompt's prefix, as our router does.
BY_PREFIX = {f"prefix{count}": count for count in (4, 64, 256)}
ROLES = {
    "pd": ("prefill", "prefill", "decode", "decode"),
    "mixed": ("mixed",) * 4,
    **{mode: ("mixed",) * count for mode, count in BY_PREFIX.items()},
}
MODES = {
    "pd": "prefill/decode: 2 + 2 instances",
    "mixed": "mixed: 4 instances",
    **{mode: f"mixed: {count} instances, chosen by prefix" for mode, count in BY_PREFIX.items()},
}
EVENTS = 256
PACED_EVENTS = 100
PACE_MS = 20
HEARTBEAT_S = 5.0
READY_S = 60.0
WARM_UP_S = 0.3
STALL_BAR_MS = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Figures = dict[str, float]


class Unable(Exception):
    """Raised if a system cannot serve a case; its text is for the table."""


@dataclass(frozen=True)
class Case:
    """One kind of load.

    Attributes:
        events: events of each stream; 0: answers are not streams.
        pace_ms: milliseconds between two events.
    """

    kind: str
    connections: int
    prompt_bytes: int = 64
    events: int = 0
    pace_ms: int = 0

    @property
    def title(self) -> str:
        load = {
            "small": "small bodies",
            "large": "128 KB prompts",
            "unique": "32 KB prompts that share nothing",
            "burst": f"streams of {EVENTS} events at once",
            "paced": f"streams of an event every {PACE_MS} ms",
        }[self.kind]
        return f"{load}, {self.connections} connection{'s' if self.connections > 1 else ''}"

    def body(self) -> bytes:
        """Return the body of a request. It has only fields of the OpenAI API; native/worker.c says how it uses them."""
        start = "#" * 16 if self.kind == "unique" else ""  # native/load.c puts a number there
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": (start + "What does a router cost? " * 6000)[: self.prompt_bytes]},
        ]
        body: dict[str, Any] = {"model": "mock", "messages": messages, "max_tokens": self.events or 16}
        if self.events:
            body |= {"stream": True, "seed": self.pace_ms}
        return json.dumps(body).encode()


CASES = (
    *(Case("small", connections) for connections in (1, 32, 256)),
    *(Case("large", connections, prompt_bytes=128_000) for connections in (1, 32, 256)),
    Case("burst", 32, events=EVENTS),
    Case("paced", 128, events=PACED_EVENTS, pace_ms=PACE_MS),
    Case("unique", 32, prompt_bytes=32_000),
)
QUICK_CASES = tuple(case for case in CASES if case.events or case.connections == 32 or case == CASES[0])


@dataclass
class System:
    """The target of a load.

    Attributes:
        ports: where the load goes to.
        pid: the process to measure; 0: there is no router.
    """

    ports: Sequence[int]
    pid: int = 0


class Cell(NamedTuple):
    mode: str
    case: Case
    system: str


def main(argv: Sequence[str] | None = None) -> int:
    args, begun, load = _arguments(argv), time.gmtime(), os.getloadavg()[0]
    cases = [
        case
        for case in (QUICK_CASES if args.quick else CASES)
        if args.case in (None, case.kind) and args.connections in (None, case.connections)
    ]
    if not cases:
        sys.exit(f"no {args.case or 'case'} is run at {args.connections} connections")
    with tempfile.TemporaryDirectory() as folder:
        peers_venv = args.peers_venv.absolute() if args.peers_venv else Path(folder) / "peers"
        numbers = dict.fromkeys(args.workers or NUMBERS_OF_WORKERS)
        wanted = args.only or ("direct", "ours", *PEERS)
        systems = [each for name in wanted for each in (map(_our_name, numbers) if name == "ours" else [name])]
        bench = Bench(Path(folder), systems, peers_venv)
        for mode in [args.mode] if args.mode else ROLES:
            # If prompts share nothing, the choice of an instance by prefix costs most; else the forwarding does.
            chosen = [case for case in cases if (case.kind == "unique") == (mode in BY_PREFIX)]
            seconds, rounds = args.seconds or (1.0 if args.quick else 2.0), args.rounds or (1 if args.quick else 3)
            bench.run(mode, chosen, seconds, rounds)
    show(bench)
    if args.json:
        args.json.write_text(json.dumps(_for_machines(bench), indent=2) + "\n")
    if args.table:
        run = describe_run("router_overhead.py", argv, begun, load)
        versions = f"{run['versions']}, {bench.versions}"
        args.table.write_text(json.dumps(make_table(bench) | run | {"versions": versions}, indent=1) + "\n")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the cost of the router, against other routers and none.")
    parser.add_argument(
        "--peers-venv", type=Path, metavar="DIR", help="virtual environment of the peers; made if absent"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, one round: about three minutes")
    parser.add_argument("--only", action="append", choices=("direct", "ours", *PEERS), help="may be repeated")
    parser.add_argument(
        "--workers", type=int, action="append", metavar="N", help="workers of ours; may be repeated (default 1, 2, 4)"
    )
    parser.add_argument("--mode", choices=tuple(ROLES))
    parser.add_argument("--case", choices=sorted({case.kind for case in CASES}))
    parser.add_argument("--connections", type=int, help="only the cases with this number of connections")
    parser.add_argument("--seconds", type=float, help="length of one measurement (default 2, quick 1)")
    parser.add_argument("--rounds", type=int, help="measurements of each case and system (default 3, quick 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="also write a table for scripts/results to this file"
    )
    return parser.parse_args(argv)


class Bench:
    """Starts systems and load, and stores all measurements."""

    def __init__(self, folder: Path, systems: Sequence[str], peers_venv: Path) -> None:
        self.folder = folder
        self.systems = systems
        self.measured: dict[Cell, list[Figures]] = {}
        self.unable: dict[Cell, str] = {}
        self.worker, self.load = (compiled(name, folder) for name in ("worker", "load"))
        self.peers = peers_venv
        self.versions = _install_peers(self.peers) if set(systems) & PEERS.keys() else "no peers"

    def run(self, mode: str, cases: Sequence[Case], seconds: float, rounds: int) -> None:
        """Measure ``cases`` on every system in turn, ``rounds`` times."""
        with contextlib.ExitStack() as running:
            workers = running.enter_context(self._workers(mode))
            systems: dict[str, System] = {}
            for name in self.systems:
                try:
                    systems[name] = running.enter_context(self._system(name, mode, workers.ports))
                except Unable as exc:
                    self.unable |= {Cell(mode, case, name): str(exc) for case in cases}
            for number in range(rounds):
                for case in cases:
                    print(f"{mode}, round {number + 1} of {rounds}: {case.title}", file=sys.stderr)
                    for name, system in systems.items():
                        self._measure(Cell(mode, case, name), system, workers, seconds)

    def medians(self) -> dict[Cell, Figures]:
        """Return the median of each figure of each cell."""
        return {
            cell: {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
            for cell, rounds in self.measured.items()
        }

    def _measure(self, cell: Cell, system: System, workers: System, seconds: float) -> None:
        if cell in self.unable:
            return
        try:
            self._run_load(replace(cell.case, pace_ms=0), system, WARM_UP_S)
            before = _times(system.pid, workers.pid)
            figures = self._run_load(cell.case, system, seconds)
            after = _times(system.pid, workers.pid)
        except Unable as exc:
            self.unable[cell] = str(exc)
            self.measured.pop(cell, None)
            return
        wall, busy, router, worker = (late - early for early, late in zip(before, after, strict=True))
        load = figures.pop("cpu_s")
        figures["router_us"] = 1e6 * router / (figures["events"] or figures["answers"])
        figures["router_cores"] = router / wall
        figures["worker_cores"] = worker / wall
        figures["load_cores"] = load / wall
        figures["other_cores"] = (busy - router - worker - load) / wall
        self.measured.setdefault(cell, []).append(figures)

    def _run_load(self, case: Case, system: System, seconds: float) -> Figures:
        body = self.folder / f"{case.kind}.json"
        body.write_bytes(case.body())
        options = {
            "ports": ",".join(map(str, system.ports)),
            "connections": case.connections,
            "seconds": seconds,
            "body": body,
            "events": case.events and case.events + 1,  # the further event is [DONE]
            "stagger-ms": case.pace_ms,
        }
        argv = [str(self.load), *(f"--{name}={value}" for name, value in options.items())]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60)
        why = done.stderr.strip().splitlines()
        if done.returncode:
            raise Unable(why[-1] if why else f"the load ended with status {done.returncode}")
        figures: Figures = json.loads(done.stdout)
        if figures["errors"] or not figures["answers"]:
            raise Unable(f"{figures['errors']:g} errors and {figures['answers']:g} answers: {' '.join(why[:1])}")
        return figures

    @contextlib.contextmanager
    def _workers(self, mode: str) -> Iterator[System]:
        with subprocess.Popen([self.worker, *ROLES[mode]], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield System([int(port) for port in process.stdout.readline().split()], process.pid)
            finally:
                process.kill()

    @contextlib.contextmanager
    def _system(self, name: str, mode: str, workers: Sequence[int]) -> Iterator[System]:
        """Start one system, and wait until it answers.

        Raises:
            Unable: the system ends, or does not answer in time.
        """
        if name == "direct":
            answering = [port for role, port in zip(ROLES[mode], workers, strict=True) if role != "prefill"]
            yield System(answering)
            return
        port, is_ours = free_port(), name not in PEERS
        command = _ours(name, mode, port) if is_ours else peer_command(name, mode, port, workers, self.peers)
        with (self.folder / f"{name}-{mode}.log").open("w+") as log, contextlib.ExitStack() as running:
            process = running.enter_context(running_process(command, log))
            if is_ours:
                running.enter_context(heartbeats(port, mode, workers))
            probe = CASES[0].body()
            deadline = time.monotonic() + READY_S
            while (status := post(port, "/v1/chat/completions", probe)) != 200:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    last = (log.read().strip().splitlines() or ["it logged nothing"])[-1]
                    raise Unable(f"does not start (answers {status}): {last[-200:]}")
                time.sleep(0.2)
            yield System([port], process.pid)


def _our_name(workers: int) -> str:
    return f"ours x{workers}" if workers > 1 else "ours"


def _ours(name: str, mode: str, port: int) -> list[str]:
    splitwise = ["--splitwise"] if mode == "pd" else []
    workers = ["--workers", name.partition(" x")[2] or "1"]
    return [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", str(port), *workers, *splitwise]


def peer_command(name: str, mode: str, port: int, workers: Sequence[int], venv: Path) -> list[str]:
    """Return the command that starts a peer with its fastest flags in front of instances at these ports."""
    urls = [f"http://127.0.0.1:{worker}" for worker in workers]
    if mode != "pd":
        instances = ["--worker-urls", *urls]
    else:
        # The peers take a bootstrap port with a prefill instance's URL; the mock instances never open it.
        prefill = [
            arg for url, worker in zip(urls[:2], workers, strict=False) for arg in ("--prefill", url, str(worker))
        ]
        decode = [arg for url in urls[2:] for arg in ("--decode", url)]
        instances = [f"--{'vllm-' if name == 'vllm-router' else ''}pd-disaggregation", *prefill, *decode]
    return [
        *(str(venv / "bin" / "python"), "-m", *PEERS[name]),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *(
            "--policy",
            "cache_aware" if mode in BY_PREFIX else "round_robin",
            "--log-level",
            "error",
            "--disable-retries",
            "--disable-circuit-breaker",
        ),
        *("--worker-startup-check-interval", "1"),
        *instances,
    ]


@contextlib.contextmanager
def running_process(command: Sequence[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in this repository's folder; at the end, kill it and all processes of its group."""
    with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def heartbeats(port: int, mode: str, workers: Sequence[int]) -> Iterator[None]:
    """Register the instances at our router every 5 s, as instances do."""

    def beat(ended: threading.Event) -> None:
        while not ended.is_set():
            taken = [
                post(port, "/register", json.dumps(registration_fields(role, worker)).encode())
                for role, worker in zip(ROLES[mode], workers, strict=True)
            ]
            ended.wait(HEARTBEAT_S if set(taken) == {200} else 0.1)

    with working_beside(beat):
        yield


def post(port: int, path: str, body: bytes) -> int:
    """Send a POST request; return the status of the answer, or 0 if there is none."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=body, headers={"content-type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=5) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return 0


def compiled(name: str, folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("a C compiler is needed for the mock instances and the load: install gcc")
    program = folder / name
    subprocess.run([compiler, "-O2", "-o", program, NATIVE / f"{name}.c"], check=True)
    return program


def _install_peers(venv: Path) -> str:
    """Make the peers' virtual environment if it does not exist; print and return the versions of the peers."""
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"installing {' and '.join(PEERS)} in {venv}", file=sys.stderr)
        try:
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *PEERS], check=True)
        except subprocess.CalledProcessError:
            sys.exit(f"the peers cannot be installed in {venv}; give --only ours, or another --peers-venv")
    versions = (
        f"from importlib.metadata import version as v; print(*(p + ' ' + v(p) for p in {tuple(PEERS)!r}), sep=', ')"
    )
    found = subprocess.run([python, "-c", versions], check=True, capture_output=True, text=True).stdout.strip()
    print(found)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _times(router: int, workers: int) -> tuple[float, float, float, float]:
    """Return the clock, and CPU seconds of all cores (including stolen time), of the router and of the instances."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / TICKS_PER_S
    return time.monotonic(), busy, cpu_seconds(router), cpu_seconds(workers)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process and all its descendants, also of ended ones; 0 for pid 0."""
    ticks = 0
    for each in family(pid) if pid else ():
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _stat_fields(each)[11:15]))
    return ticks / TICKS_PER_S


def family(pid: int) -> set[int]:
    """Return the ids of a session leader, its descendants, and the other processes of its session, such as orphans."""
    parents: dict[int, int] = {}
    found = {pid}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            _, parent, _, session = _stat_fields(int(folder.name))[:4]
            parents[int(folder.name)] = int(parent)
            if int(session) == pid:
                found.add(int(folder.name))
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Bar(NamedTuple):
    """One figure, and the bar that it must meet."""

    name: str
    value: float
    bar: str
    is_met: bool


def bars(measured: dict[Cell, list[Figures]]) -> list[Bar]:
    """Return the bars for which there are measurements; each value is the median over the rounds."""
    found = []
    names = dict.fromkeys(cell.system for cell in measured if cell.system.startswith("ours"))
    wanted = _our_name(WORKERS_OF_THE_BARS)
    ours = wanted if wanted in names else next(iter(names), "")

    def compare(mode: str, case: Case, other: str, compared: Callable[[Figures, Figures], float]) -> float | None:
        rounds = zip(measured.get(Cell(mode, case, ours), ()), measured.get(Cell(mode, case, other), ()), strict=False)
        values = [compared(own, theirs) for own, theirs in rounds]
        return statistics.median(values) if values else None

    def hold(mode: str, case: Case, name: str, figure: str, peers: Sequence[str], least: float, most: float) -> None:
        for peer in peers:
            ratio = compare(mode, case, peer, lambda own, theirs: own[figure] / theirs[figure])
            if ratio is not None:
                bar = f">= {least:g}" if least else f"<= {most:g}"
                found.append(Bar(f"{mode}, {name}, {ours} / {peer}", ratio, bar, least <= ratio <= most))

    everybody = tuple(PEERS)
    for mode, faster, peers in (("pd", 1.3, everybody[:2]), ("mixed", 1.0, everybody)):
        # CPU and p50: in P/D mode, our router must not be worse than any peer; in mixed mode, not than the peer with
        # similar features.
        equals = everybody if mode == "pd" else everybody[:1]
        hold(mode, Case("small", 32), "small, 32: req/s", "per_s", peers, faster, math.inf)
        hold(mode, Case("small", 32), "small, 32: CPU per request", "router_us", equals, 0.0, 1.0)
        hold(mode, Case("small", 1), "small, 1: p50", "latency_p50_us", equals, 0.0, 1.0)
    hold("prefix64", CASES[-1], "32 KB that share nothing, 32: p99", "latency_p99_us", everybody[:1], 0.0, 1.0)
    for mode, case in dict.fromkeys((cell.mode, cell.case) for cell in measured if cell.case.events):
        if case.kind == "burst":
            hold(mode, case, "burst: events/s", "events_per_s", everybody, 1.0, math.inf)
        hold(mode, case, f"{case.kind}: CPU per event", "router_us", everybody, 0.0, 1.0)
        stall = compare(mode, case, "direct", lambda own, direct: own["stall_p99_us"] - direct["stall_p99_us"])
        if stall is not None:
            name = f"{mode}, {case.kind}: stall at a stream's end, p99, ms more than direct"
            found.append(Bar(name, stall / 1e3, f"< {STALL_BAR_MS:g}", stall / 1e3 < STALL_BAR_MS))
    return found


Column = tuple[str, Callable[[Figures, Figures], float], str]


def _plain(figure: str, scale: float = 1.0) -> Callable[[Figures, Figures], float]:
    return lambda own, direct: own[figure] * scale


def _added(figure: str) -> Callable[[Figures, Figures], float]:
    return lambda own, direct: (own[figure] - direct[figure]) / 1e3 if direct else math.nan


SHARED: tuple[Column, ...] = (
    ("router", _plain("router_cores"), ".2f"),
    ("inst.", _plain("worker_cores"), ".2f"),
    ("load", _plain("load_cores"), ".2f"),
    ("others", _plain("other_cores"), ".2f"),
)
ANSWERS: tuple[Column, ...] = (
    ("req/s", _plain("per_s"), ",.0f"),
    ("CPU us/req", _plain("router_us"), ".1f"),
    ("p50 ms", _plain("latency_p50_us", 1e-3), ".3f"),
    ("p99 ms", _plain("latency_p99_us", 1e-3), ".2f"),
    ("+p50 ms", _added("latency_p50_us"), ".3f"),
    ("+p99 ms", _added("latency_p99_us"), ".2f"),
    *SHARED,
)
BURSTS: tuple[Column, ...] = (
    ("streams/s", _plain("per_s"), ",.0f"),
    ("events/s", _plain("events_per_s"), ",.0f"),
    ("CPU us/event", _plain("router_us"), ".2f"),
    ("p50 ms", _plain("latency_p50_us", 1e-3), ".2f"),
    ("p99 ms", _plain("latency_p99_us", 1e-3), ".2f"),
    ("stall p99 ms", _plain("stall_p99_us", 1e-3), ".2f"),
    *SHARED,
)
PACED: tuple[Column, ...] = (
    ("events/s", _plain("events_per_s"), ",.0f"),
    ("CPU us/event", _plain("router_us"), ".2f"),
    ("+first p50 ms", _added("first_event_p50_us"), ".2f"),
    ("+first p99 ms", _added("first_event_p99_us"), ".2f"),
    ("gap p99 ms", _plain("gap_p99_us", 1e-3), ".2f"),
    ("stall p99 ms", _plain("stall_p99_us", 1e-3), ".2f"),
    *SHARED,
)
# The most important figures, from three cases.
SUMMARY: tuple[tuple[str, Case, str, str], ...] = (
    ("req/s", Case("small", 32), "per_s", ",.0f"),
    ("CPU us/req", Case("small", 32), "router_us", ".1f"),
    ("p50 us at 1", Case("small", 1), "latency_p50_us", ".0f"),
    ("SSE events/s", Case("burst", 32, events=EVENTS), "events_per_s", ",.0f"),
    ("CPU us/event", Case("burst", 32, events=EVENTS), "router_us", ".2f"),
)
COLUMNS = {"small": ANSWERS, "large": ANSWERS, "unique": ANSWERS, "burst": BURSTS, "paced": PACED}


def show(bench: Bench) -> None:
    """Print the tables."""
    figures, unable = bench.medians(), bench.unable
    print(f"{os.cpu_count()} cores, shared by router, instances and load; the last columns are cores in use")
    for mode, case in dict.fromkeys((cell.mode, cell.case) for cell in (*figures, *unable)):
        columns = COLUMNS[case.kind]
        print(f"\n{MODES[mode]}; {case.title}")
        print(f"  {'':<14}" + "".join(f"{name:>14}" for name, _, _ in columns))
        direct = figures.get(Cell(mode, case, "direct"), {})
        for cell, own in figures.items():
            if (cell.mode, cell.case) == (mode, case):
                cells = "".join(f"{value(own, direct):>14{form}}" for _, value, form in columns)
                print(f"  {cell.system:<14}{cells}")
        for cell, why in unable.items():
            if (cell.mode, cell.case) == (mode, case):
                print(f"  {cell.system:<14}  {why}")
    _show_summary(figures)
    print()
    for bar in bars(bench.measured):
        print(f"{bar.name:<70}{bar.value:>8.2f}{bar.bar:>10}  {'met' if bar.is_met else 'MISSED'}")


def _show_summary(figures: dict[Cell, Figures]) -> None:
    for mode in dict.fromkeys(cell.mode for cell in figures):
        print(f"\n{MODES[mode]}; in short: small bodies at 32 connections and at one, bursts at 32")
        print(f"  {'':<14}" + "".join(f"{name:>14}" for name, *_ in SUMMARY))
        for system in dict.fromkeys(cell.system for cell in figures if cell.mode == mode):
            cells = [(figures.get(Cell(mode, case, system), {}).get(figure), form) for _, case, figure, form in SUMMARY]
            print(
                f"  {system:<14}"
                + "".join(f"{'-':>14}" if each is None else f"{each:>14{form}}" for each, form in cells)
            )


def _for_machines(bench: Bench) -> dict[str, Any]:
    return {
        "figures": [
            {
                "mode": cell.mode,
                "case": cell.case.kind,
                "connections": cell.case.connections,
                "system": cell.system,
                **own,
            }
            for cell, own in bench.medians().items()
        ],
        "unable": [[cell.mode, cell.case.title, cell.system, why] for cell, why in bench.unable.items()],
        "bars": [bar._asdict() for bar in bars(bench.measured)],
    }


def make_table(bench: Bench) -> dict[str, Any]:
    """Return the figures of the modes in which instances are chosen by prefix, as a table for ``scripts/results``."""
    medians = bench.medians()
    modes = [mode for mode in BY_PREFIX if any(cell.mode == mode for cell in medians)]
    figures = (
        ("requests/s", "per_s", 1.0, "higher", 0),
        ("CPU µs per request", "router_us", 1.0, "lower", 0),
        ("p99, ms", "latency_p99_us", 1e-3, "lower", 1),
    )
    columns, rows = [], []
    for mode in modes:
        for name, _, _, better, _ in figures:
            columns.append({"name": f"{name}, {BY_PREFIX[mode]}", "better": better, "plot": better == "higher"})
    for system in (each for each in bench.systems if each != "direct"):
        own = [medians.get(Cell(mode, CASES[-1], system), {}) for mode in modes]
        values = [
            round(each[figure] * scale, digits or None) if each else None
            for each in own
            for _, figure, scale, _, digits in figures
        ]
        rows.append({"name": system.replace("ours", "kvrouter"), "ours": system.startswith("ours"), "values": values})
    return {
        "section": "routers",
        "title": "Mixed instances chosen by prefix, prompts of 32 KB that share nothing",
        "row": "router; number of instances",
        "columns": columns,
        "rows": rows,
        "notes": [f"{cell.system}, {MODES[cell.mode]}: {why}." for cell, why in bench.unable.items()],
        "spread": "medians of the rounds, 32 connections",
    }


if __name__ == "__main__":
    sys.exit(main())
