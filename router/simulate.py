"""Replays a trace of requests over simulated instances, through the policy objects that the router runs.

    python -m router.simulate --trace ../shared/traces/conversation_trace.jsonl --instances 8 --headroom 0.9

A simulated instance prefills one request after another at a fixed rate, and keeps the blocks that it used last; the
pool keeps the blocks of all instances, and a token from there costs a quarter of computing it. A request's time to
first token is its wait and its prefill; decoding is not simulated.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from router.policies import POLICIES, Decision, InstanceLoad, Outcome, Policy, PolicyOptions, RequestFeatures
from router.settings import FlagParser, SettingsError

__all__ = ["Arrival", "BadInput", "Cluster", "Report", "main", "read_trace", "replay"]

TOKENS_PER_BLOCK = 512
"""Of the traces that Mooncake published; a ``hash_ids`` entry stands for this many tokens."""
_INSTANCES_OF_TRACE = 8
"""For so many the trace is replayed at its own pace; for more, faster in proportion."""
_POOL_BLOCKS = 1_000_000


class BadInput(ValueError):
    """A trace or a flag that cannot be used; one sentence."""


class Arrival(NamedTuple):
    """One request of a trace."""

    at: float
    """Seconds since the trace's start."""
    tokens: int
    """Of its prompt."""
    blocks: tuple[int, ...]
    """The chained hashes of its prompt's blocks; the last one may be partly filled."""


def read_trace(path: Path) -> list[Arrival]:
    """The requests of a trace in Mooncake's form: JSON lines with timestamp (ms), input_length and hash_ids.

    Raises:
        BadInput: there is no such file, or a line is no such request.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise BadInput(f"--trace {path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    arrivals = sorted(_parse_arrival(line, f"{path}, line {number}") for number, line in enumerate(lines, 1))
    if not arrivals or arrivals[-1].at <= arrivals[0].at:
        raise BadInput(f"{path} has no requests over some time; at least two at different timestamps are needed")
    return arrivals


def _parse_arrival(line: str, where: str) -> Arrival:
    try:
        entry = json.loads(line)
        at, tokens, blocks = entry["timestamp"] / 1000, entry["input_length"], tuple(entry["hash_ids"])
    except (ValueError, TypeError, KeyError):
        at, tokens, blocks = math.nan, None, ()
    if not (math.isfinite(at) and isinstance(tokens, int) and tokens > 0 and all(isinstance(b, int) for b in blocks)):
        raise BadInput(
            f"{where} is no request; it must be a JSON object with a number timestamp (ms), a positive number "
            "input_length and a list of numbers hash_ids, as in Mooncake's traces"
        )
    return Arrival(at, tokens, blocks)


class Cluster(NamedTuple):
    """The instances and the pool that are simulated."""

    instances: int
    tokens_per_second: float
    """That one instance computes."""
    cache_blocks: int
    """That one instance keeps."""
    pool_blocks: int
    fetch_cost: float = 0.25
    """Time that a token from the pool takes, as a part of computing it."""


@dataclass
class Report:
    """How a policy did."""

    ttft: list[float] = field(default_factory=list)
    """Seconds, by request."""
    tokens: int = 0
    own_tokens: int = 0
    """Of these, held by the instance that the request went to."""
    pool_tokens: int = 0
    """Of these, fetched from the pool."""
    decision_seconds: float = 0.0
    """CPU that all choices took."""


class _Blocks:
    """Blocks kept, the longest unused being dropped for new ones."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count_leading(self, blocks: Sequence[int]) -> int:
        """How many of the first ones are here."""
        return next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def use_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class _Placed(NamedTuple):
    """A request at its instance."""

    arrival: Arrival
    features: RequestFeatures
    decision: Decision
    queued: float


class _Instance:
    """Prefills one request after another."""

    def __init__(self, key: str, cache_blocks: int) -> None:
        self.load = InstanceLoad(key)
        self.blocks = _Blocks(cache_blocks)
        self.line: deque[_Placed] = deque()
        self.own_tokens = self.cached_tokens = 0  # of the request being prefilled


def replay(
    arrivals: Sequence[Arrival],
    cluster: Cluster,
    make_policy: Callable[..., Policy],
) -> Report:
    """Send the requests where a policy says, at their times, and let it learn from their outcomes."""
    random.seed(0)
    now = 0.0
    policy = make_policy(PolicyOptions(), lambda: now)
    instances = {
        key: _Instance(key, cluster.cache_blocks) for key in map("instance-{}".format, range(cluster.instances))
    }
    candidates = [instance.load for instance in instances.values()]
    pool = _Blocks(cluster.pool_blocks)
    report = Report()
    ends: list[tuple[float, str]] = []  # when, and whose prefill

    def begin_prefill(instance: _Instance) -> None:
        arrival = instance.line[0].arrival
        own = instance.blocks.count_leading(arrival.blocks)
        shared = max(own, pool.count_leading(arrival.blocks))
        own_tokens = instance.own_tokens = min(own * TOKENS_PER_BLOCK, arrival.tokens)
        instance.cached_tokens = min(shared * TOKENS_PER_BLOCK, arrival.tokens)
        pool_tokens = instance.cached_tokens - own_tokens
        instance.blocks.use_blocks(arrival.blocks[:shared])
        report.tokens += arrival.tokens
        report.own_tokens += own_tokens
        report.pool_tokens += pool_tokens
        work = arrival.tokens - instance.cached_tokens + cluster.fetch_cost * pool_tokens
        heapq.heappush(ends, (now + work / cluster.tokens_per_second, instance.load.key))

    def end_prefill(instance: _Instance) -> None:
        arrival, features, decision, queued = instance.line.popleft()
        load = instance.load
        load.requests -= 1
        load.tokens -= arrival.tokens
        load.queued -= decision.work
        ttft = now - arrival.at
        report.ttft.append(ttft)
        instance.blocks.use_blocks(arrival.blocks)
        pool.use_blocks(arrival.blocks)
        policy.observe_outcome(
            features,
            decision,
            Outcome(load.key, queued, ttft, arrival.tokens, instance.cached_tokens, instance.own_tokens),
        )
        if instance.line:
            begin_prefill(instance)

    def place_request(arrival: Arrival) -> None:
        features = RequestFeatures(arrival.tokens, lambda: arrival.blocks, tokens_per_chunk=TOKENS_PER_BLOCK)
        started = time.process_time()
        decision = policy.choose_instance(features, candidates)
        report.decision_seconds += time.process_time() - started
        instance = instances[decision.key]
        load = instance.load
        instance.line.append(_Placed(arrival, features, decision, load.queued))
        load.requests += 1
        load.tokens += arrival.tokens
        load.queued += decision.work
        if len(instance.line) == 1:
            begin_prefill(instance)

    for arrival in arrivals:
        while ends and ends[0][0] <= arrival.at:
            now, key = heapq.heappop(ends)
            end_prefill(instances[key])
        now = arrival.at
        place_request(arrival)
    while ends:
        now, key = heapq.heappop(ends)
        end_prefill(instances[key])
    return report


def _pace_arrivals(
    arrivals: Sequence[Arrival], instances: int, headroom: float, cache_blocks: int
) -> tuple[list[Arrival], Cluster]:
    """The requests at the pace of so many instances, which can compute ``headroom`` times all their tokens."""
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


def _make_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m router.simulate",
        description="Replays a trace of requests over simulated instances, by each policy of the router.",
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="JSON lines, as Mooncake's traces")
    parser.add_argument("--instances", type=_positive_number(int), default=8, metavar="N", help="(default 8)")
    parser.add_argument(
        "--headroom", type=_positive_number(float), default=0.9, metavar="H",
        help="what all instances can compute, as a part of all prompt tokens (default 0.9)",
    )  # fmt: skip
    parser.add_argument(
        "--cache-blocks", type=_positive_number(int), default=3000, metavar="N",
        help=f"blocks of {TOKENS_PER_BLOCK} tokens that an instance keeps (default 3000)",
    )  # fmt: skip
    parser.add_argument("--policy", choices=POLICIES, action="append", help="only this one; may come more than once")
    return parser


def _positive_number(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"it is {text}; it must be more than 0")
        return value

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    try:
        args = _make_parser().parse_args(sys.argv[1:] if argv is None else argv)
        arrivals, cluster = _pace_arrivals(read_trace(args.trace), args.instances, args.headroom, args.cache_blocks)
    except (BadInput, SettingsError) as exc:
        print(f"router.simulate: {exc}", file=sys.stderr)
        return 2
    print(
        f"{len(arrivals)} requests in {arrivals[-1].at:.0f} s over {cluster.instances} instances of "
        f"{cluster.tokens_per_second:.0f} tokens/s, headroom {args.headroom:g}"
    )
    print(f"{'policy':24}{'own':>8}{'pool':>8}{'TTFT mean':>10}{'p50':>10}{'p99 (s)':>10}{'CPU ms each':>12}")
    for name in args.policy or POLICIES:
        print(_format_row(name, replay(arrivals, cluster, POLICIES[name])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
