"""kvrouter simulate: replays a trace of requests at simulated instances, with the same policies as the router.

    kvrouter simulate --trace ../shared/traces/conversation_trace.jsonl --instances 8 --headroom 0.9
    kvrouter simulate --trace FILE --policy pool_aware --spread --routers 4 --propagation-ms 50

A simulated instance prefills one request after another at a fixed rate, and caches the most recently used blocks. The
pool stores the blocks of all instances. Fetching a token from the pool takes a quarter of the time for computing it. A
request's time to first token is its waiting time plus the time of its prefill. Decode is not simulated.

With ``--routers N``, there are N router processes. For each request, a process drawn at random chooses the instance.
Each process has its own policy, which learns from its own requests. Loads and prompts of other processes arrive through
the router's own ``LoadSync`` and ``PrefixSync``: sent at the router's intervals, with a delay of ``--propagation-ms``.
In Mooncake's traces, all requests within 3 s have the same timestamp, and a process cannot know what other processes
choose at the same time. So use ``--spread``, which spreads these requests over the 3 s, to compare values of N.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import heapq
import itertools
import json
import math
import random
import selectors
import statistics
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from router.fleet import Registration, Registry, Role
from router.policies import POLICIES, Decision, Outcome, Policy, PolicyOptions, RequestFeatures
from router.settings import FlagParser, SettingsError
from router.sharing import Link, LoadSync, PrefixSync

__all__ = [
    "Arrival",
    "BadInput",
    "Cluster",
    "Division",
    "Report",
    "main",
    "make_parser",
    "read_trace",
    "replay",
    "spread_arrivals",
]

TOKENS_PER_BLOCK = 512
"""Number of tokens for each entry of ``hash_ids`` in the traces that Mooncake has published."""
_INSTANCES_OF_TRACE = 8
"""Number of instances for which the trace is replayed at its own rate. With twice as many, the rate is doubled."""
_POOL_BLOCKS = 1_000_000
_MAX_TOKENS = 1 << 53  # a float can have each whole number below
_REQUESTS_PER_REPORT = 100
_LINE_SECONDS = 5.0


class BadInput(ValueError):
    """A trace or a flag cannot be used. The message is one sentence."""


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float
    """Seconds since the start of the trace."""
    tokens: int
    """Number of prompt tokens."""
    blocks: tuple[int, ...]
    """Hashes of the prompt's blocks. Each hash also covers the earlier blocks. The last block may be partly filled."""


def read_trace(path: Path) -> list[Arrival]:
    """Read the requests of a trace in Mooncake's format: lines of JSON with timestamp (ms), input_length and hash_ids.

    Raises:
        BadInput: the file cannot be read, or a line is not a valid request.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise BadInput(f"--trace {path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    arrivals = sorted(_parse_arrival(line, f"{path}, line {number}") for number, line in enumerate(lines, 1))
    if not arrivals or arrivals[-1].at <= arrivals[0].at:
        raise BadInput(f"{path} must have at least two requests with different timestamps")
    return arrivals


def _parse_arrival(line: str, where: str) -> Arrival:
    try:
        entry = json.loads(line)
        at, tokens, blocks = entry["timestamp"] / 1000, entry["input_length"], tuple(entry["hash_ids"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        at, tokens, blocks = math.nan, None, ()
    is_chain = all(isinstance(block, int) and 0 <= block < 2**64 for block in blocks)
    if not (math.isfinite(at) and isinstance(tokens, int) and 0 < tokens < _MAX_TOKENS and is_chain):
        raise BadInput(
            f"{where} is not a request; it must be a JSON object with timestamp (a number, in ms), input_length (a "
            "positive whole number) and hash_ids (a list of whole numbers of at least 0), as in Mooncake's traces"
        )
    return Arrival(at, tokens, blocks)


class Cluster(NamedTuple):
    """The simulated instances and the simulated pool."""

    instances: int
    tokens_per_second: float
    """Number of tokens that one instance computes per second."""
    cache_blocks: int
    """Number of blocks that one instance can cache."""
    pool_blocks: int
    fetch_cost: float = 0.25
    """Time to fetch a token from the pool, as a fraction of the time to compute it."""


@dataclass
class Report:
    """The results of replaying a trace with one policy."""

    ttft: list[float] = field(default_factory=list)
    """Time to first token of each request, in seconds."""
    tokens: int = 0
    """Number of prompt tokens of all requests."""
    own_tokens: int = 0
    """Number of prompt tokens from the own cache of the request's instance."""
    pool_tokens: int = 0
    """Number of prompt tokens that were fetched from the pool."""
    decision_seconds: float = 0.0
    """CPU seconds that the policy took for all its choices."""


class _Blocks:
    """A cache of blocks. When it is full, the least recently used blocks are evicted."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count_leading(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that are in the cache."""
        return next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def use_blocks(self, blocks: Iterable[int]) -> None:
        """Add ``blocks`` that are not in the cache yet, and mark all ``blocks`` as just used."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class Division(NamedTuple):
    """The router processes that choose instances for the requests."""

    routers: int = 1
    propagation: float = 0.0
    """Seconds that a message about loads takes from one process to another."""
    prefix_propagation: float = 0.0
    """Seconds that a message about prompts takes from one process to another."""
    seed: int = 0
    """Seed of all random choices, such as the process that handles a request."""


_UNDIVIDED = Division()


class _Timeline(asyncio.SelectorEventLoop):
    """An event loop with a simulated clock. Instead of waiting, the clock jumps to the next scheduled event."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Return the simulated time in seconds."""
        return self._jumps.now

    async def wait_until(self, at: float) -> None:
        """Run all events that are scheduled before the time ``at``."""
        if at > self.time():
            await asyncio.sleep(at - self.time())


class _Jumps(selectors.DefaultSelector):
    """The selector of the simulated event loop. Instead of waiting, it advances the simulated clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the simulated clock by ``timeout``. No file is ever ready."""
        self.now += timeout or 0.0
        return []


class _SlowLink(Link):
    """A link that delivers messages after a delay."""

    def __init__(self, name: str, division: Division) -> None:
        super().__init__(name)
        self.is_alone = False
        self.others: list[_SlowLink] = []
        self._seconds = {"load": division.propagation, "chains": division.prefix_propagation}

    def send_message(self, *message: Any) -> None:
        """Deliver a message to all other processes. Its topic, loads or prompts, decides the delay."""
        topic = message[2]
        loop = asyncio.get_running_loop()
        for other in self.others:
            loop.call_later(self._seconds[topic], other.on_message, [*message])


class _Router:
    """One router process: its policy, and the loads that it knows."""

    def __init__(self, policy: Policy, link: Link, keys: Iterable[str]) -> None:
        self.policy = policy
        self.registry = Registry(splitwise=False)
        self.load_sync = LoadSync(link, self.registry)
        self.prefix_sync = PrefixSync(link, {Role.MIXED: policy})
        for key in keys:
            host, _, port = key.partition(":")
            fields = {"role": "mixed", "host_ip": host, "port": port}
            self.registry.register(Registration.from_fields(fields), now=0.0)
        self.loads = {instance.key: instance.load for instance in self.registry}
        self.candidates = list(self.loads.values())


class _Assigned(NamedTuple):
    """A request that was assigned to an instance, with the decision of the policy."""

    arrival: Arrival
    features: RequestFeatures
    decision: Decision
    queued: float
    router: _Router


class _Instance:
    """A simulated instance, which prefills one request after another."""

    def __init__(self, key: str, cache_blocks: int) -> None:
        self.key = key
        self.blocks = _Blocks(cache_blocks)
        self.line: deque[_Assigned] = deque()
        self.own_tokens = self.cached_tokens = 0  # cached tokens of the request that is being prefilled


class _Replay:
    """Replays requests with a simulated cluster and its router processes."""

    def __init__(
        self,
        cluster: Cluster,
        make_policy: Callable[..., Policy],
        division: Division,
        on_progress: Callable[[int], None],
    ) -> None:
        self.report = Report()
        self._on_progress = on_progress
        self._cluster = cluster
        self._instances = {
            key: _Instance(key, cluster.cache_blocks) for key in map("instance-{}:1".format, range(cluster.instances))
        }
        self._pool = _Blocks(cluster.pool_blocks)
        self._ends: list[tuple[float, str]] = []  # for each running prefill, the time of its end and the instance's key
        self._timeline = _Timeline()
        self._dice = random.Random(division.seed)
        links = [_SlowLink(str(number), division) for number in range(division.routers)]
        for link in links:
            link.others = [other for other in links if other is not link]
        self._routers = [
            _Router(make_policy(PolicyOptions(), self._timeline.time), link, self._instances)
            for link in (links if division.routers > 1 else [Link()])
        ]

    def play_all(self, arrivals: Sequence[Arrival]) -> None:
        """Replay the requests at their times, until the last request has its first token."""
        try:
            self._timeline.run_until_complete(self._assign_all(arrivals))
        finally:
            self._timeline.close()

    async def _assign_all(self, arrivals: Sequence[Arrival]) -> None:
        sending = [asyncio.ensure_future(router.load_sync.keep_sending()) for router in self._routers]
        for number, arrival in enumerate(arrivals):
            await self._end_prefills(arrival.at)
            await self._timeline.wait_until(arrival.at)
            self._assign_request(arrival)
            if number % _REQUESTS_PER_REPORT == 0:
                self._on_progress(number)
        await self._end_prefills(math.inf)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    async def _end_prefills(self, until: float) -> None:
        """Advance the time to ``until``, and end all prefills that end before."""
        while self._ends and self._ends[0][0] <= until:
            at, key = heapq.heappop(self._ends)
            await self._timeline.wait_until(at)
            self._end_prefill(self._instances[key], at)

    def _assign_request(self, arrival: Arrival) -> None:
        """Let a random router process choose an instance for the request, which is added to the instance's queue."""
        router = self._dice.choice(self._routers)
        features = RequestFeatures(arrival.tokens, lambda: arrival.blocks, tokens_per_chunk=TOKENS_PER_BLOCK)
        started = time.process_time()
        decision = router.policy.choose_instance(features, router.candidates)
        self.report.decision_seconds += time.process_time() - started
        instance, load = self._instances[decision.key], router.loads[decision.key]
        instance.line.append(_Assigned(arrival, features, decision, load.queued, router))
        load.add_request(arrival.tokens, decision.work)
        if len(instance.line) == 1:
            self._begin_prefill(instance, arrival.at)

    def _begin_prefill(self, instance: _Instance, now: float) -> None:
        """Begin the prefill of the first request in the instance's queue."""
        arrival, cluster = instance.line[0].arrival, self._cluster
        own = instance.blocks.count_leading(arrival.blocks)
        shared = max(own, self._pool.count_leading(arrival.blocks))
        own_tokens = instance.own_tokens = min(own * TOKENS_PER_BLOCK, arrival.tokens)
        instance.cached_tokens = min(shared * TOKENS_PER_BLOCK, arrival.tokens)
        pool_tokens = instance.cached_tokens - own_tokens
        instance.blocks.use_blocks(arrival.blocks[:shared])
        self.report.tokens += arrival.tokens
        self.report.own_tokens += own_tokens
        self.report.pool_tokens += pool_tokens
        work = arrival.tokens - instance.cached_tokens + cluster.fetch_cost * pool_tokens
        heapq.heappush(self._ends, (now + work / cluster.tokens_per_second, instance.key))

    def _end_prefill(self, instance: _Instance, now: float) -> None:
        """End the prefill of the first request in the instance's queue, and report the result to its router process."""
        arrival, features, decision, queued, router = instance.line.popleft()
        router.loads[instance.key].remove_request(arrival.tokens, decision.work)
        ttft = now - arrival.at
        self.report.ttft.append(ttft)
        instance.blocks.use_blocks(arrival.blocks)
        self._pool.use_blocks(arrival.blocks)
        router.policy.observe_outcome(
            features,
            decision,
            Outcome(
                instance.key, queued, ttft, arrival.tokens, instance.cached_tokens, instance.own_tokens, seconds=ttft
            ),
        )
        if instance.line:
            self._begin_prefill(instance, now)


def replay(
    arrivals: Sequence[Arrival],
    cluster: Cluster,
    make_policy: Callable[..., Policy],
    division: Division = _UNDIVIDED,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Replay the requests at their arrival times with one policy, and return the results.

    Args:
        arrivals: the requests.
        cluster: the instances and the pool.
        make_policy: creates the policy of a router process.
        division: the number of router processes, the delays of messages between them, and the random seed.
        on_progress: called regularly with the number of requests that were replayed so far.
    """
    random.seed(division.seed)
    work = _Replay(cluster, make_policy, division, on_progress)
    work.play_all(arrivals)
    return work.report


def spread_arrivals(arrivals: Sequence[Arrival], seed: int = 0) -> list[Arrival]:
    """Distribute requests with equal timestamps at random over the time until the next timestamp, in the same order."""
    dice = random.Random(seed)
    moments = [list(group) for _, group in itertools.groupby(arrivals, key=lambda arrival: arrival.at)]
    starts = [moment[0].at for moment in moments]
    ends = [*starts[1:], 2 * starts[-1] - starts[-2]]  # the last step is assumed to be as long as the previous step
    return [
        arrival._replace(at=at)
        for moment, start, end in zip(moments, starts, ends, strict=True)
        for arrival, at in zip(moment, sorted(dice.uniform(start, end) for _ in moment), strict=True)
    ]


def _pace_arrivals(
    arrivals: Sequence[Arrival], instances: int, headroom: float, cache_blocks: int
) -> tuple[list[Arrival], Cluster]:
    """Scale the rate of the requests to the number of instances, and choose how fast these instances compute.

    All instances together can compute ``headroom`` times the prompt tokens that arrive in the same time.
    """
    pace = instances / _INSTANCES_OF_TRACE
    paced = [arrival._replace(at=(arrival.at - arrivals[0].at) / pace) for arrival in arrivals]
    demand = sum(arrival.tokens for arrival in paced) / paced[-1].at
    return paced, Cluster(instances, headroom * demand / instances, cache_blocks, _POOL_BLOCKS)


def _format_row(name: str, report: Report) -> str:
    cuts = statistics.quantiles(report.ttft, n=100)
    return (
        f"{name:24}{report.own_tokens / report.tokens:8.1%}{report.pool_tokens / report.tokens:8.1%}"
        f"{statistics.fmean(report.ttft):10.2f}{cuts[49]:10.2f}{cuts[98]:10.2f}"
        f"{1000 * report.decision_seconds / len(report.ttft):12.4f}"
    )


def make_parser() -> FlagParser:
    """Return the parser of the command's flags."""
    parser = FlagParser(
        prog="kvrouter simulate",
        description="Replays a trace of requests at simulated instances, with all policies of the router or with some.",
    )
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="JSON lines in the format of Mooncake's traces"
    )
    parser.add_argument(
        "--instances", type=_positive_number(int), default=8, metavar="N", help="number of instances (default 8)"
    )
    parser.add_argument(
        "--headroom", type=_positive_number(float), default=0.9, metavar="H",
        help="prompt tokens that all instances together compute per second, divided by those that arrive (default 0.9)",
    )  # fmt: skip
    parser.add_argument(
        "--cache-blocks", type=_positive_number(int), default=3000, metavar="N",
        help=f"blocks of {TOKENS_PER_BLOCK} tokens that an instance caches (default 3000)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=POLICIES, action="append", help="simulate only this policy; repeat the flag for more"
    )
    parser.add_argument(
        "--routers", type=_positive_number(int), default=1, metavar="N",
        help="number of router processes; a random one chooses the instance for a request (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--propagation-ms", type=_positive_number(float, or_zero=True), default=1.0, metavar="MS",
        help="delay of a message between two processes (default 1); loads are sent at most every 25 ms, prompts "
        "every 100 ms",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-propagation-ms", type=_positive_number(float, or_zero=True), metavar="MS",
        help="delay of a message about prompts (default: the value of --propagation-ms)",
    )  # fmt: skip
    parser.add_argument(
        "--spread", action="store_true",
        help="spread requests with equal timestamps randomly until the next timestamp",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices (default 0)")
    return parser


def _positive_number(kind: type[int] | type[float], *, or_zero: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 <= value < math.inf or not (value or or_zero):
            raise argparse.ArgumentTypeError(f"it is {text}; it must be {'0 or more' if or_zero else 'more than 0'}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation. Return the exit status."""
    try:
        args = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
        arrivals = read_trace(args.trace)
        arrivals = spread_arrivals(arrivals, args.seed) if args.spread else arrivals
        arrivals, cluster = _pace_arrivals(arrivals, args.instances, args.headroom, args.cache_blocks)
    except (BadInput, SettingsError) as exc:
        print(f"kvrouter simulate: {exc}", file=sys.stderr)
        return 2
    prefix_ms = args.propagation_ms if args.prefix_propagation_ms is None else args.prefix_propagation_ms
    division = Division(args.routers, args.propagation_ms / 1000, prefix_ms / 1000, args.seed)
    routers = f", {args.routers} routers" if args.routers > 1 else ""
    print(
        f"{len(arrivals)} requests in {arrivals[-1].at:.0f} s over {cluster.instances} instances of "
        f"{cluster.tokens_per_second:.0f} tokens/s, headroom {args.headroom:g}{routers}"
    )
    print(f"{'policy':24}{'own':>8}{'pool':>8}{'TTFT mean':>10}{'p50':>10}{'p99 (s)':>10}{'CPU ms each':>12}")
    names = list(args.policy or POLICIES)
    progress = _Progress(len(names) * len(arrivals))
    with progress:
        for number, name in enumerate(names):
            on_progress = functools.partial(progress.show, name, number * len(arrivals))
            report = replay(arrivals, cluster, POLICIES[name], division, on_progress)
            progress.print_row(_format_row(name, report))
    return 0


class _Progress:
    """Shows the number of replayed requests on standard error: as a bar on a terminal, else as lines."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._printed_at = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._bar = Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal, transient=True, redirect_stdout=False,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, policy: str, before: int, number: int) -> None:
        """Show the progress: ``before`` requests were replayed with earlier policies, ``number`` with ``policy``."""
        done, now = before + number, time.monotonic()
        self._bar.update(self._task, completed=done, description=policy)
        if self._bar.disable and now - self._printed_at >= _LINE_SECONDS:
            self._printed_at = now
            left = (now - self._began) * (self._total - done) / max(1, done)
            print(f"kvrouter simulate: {policy}, {done / self._total:.0%}, about {left:.0f} s left", file=sys.stderr)

    def print_row(self, row: str) -> None:
        """Print a row of the report, above the bar."""
        self._bar.stop()
        print(row, flush=True)
        self._bar.start()
