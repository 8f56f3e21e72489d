"""Write a trace of coding agents in Mooncake's format, drawn from the published statistics of InferenceX AgentX.

    python benchmarks/agent_trace.py agents.jsonl
    python benchmarks/agent_trace.py small.jsonl --sessions 12 --scale 0.01 --block-tokens 16
    kvrouter simulate --trace agents.jsonl --headroom 0.1 --policy pool_aware
    aiperf analyze-trace small.jsonl

AgentX v1.0 has 393 recorded sessions of a coding agent: the median session has 43 turns, the median request 142,016
input tokens and 444 output tokens; more than 96 % of the input tokens are a prefix of an earlier request of the
session; 44 % of the sessions have sub-agents; and the main agent's median pause for its tools is 4.9 s. This program
draws sessions with these figures. Figures that are not published are our choice: spreads, lengths of tool results,
sizes at which an agent summarises its context. No turn waits for a human user. The same seed gives the same file.

Each line is a request with its whole prompt: ``timestamp`` (ms), ``input_length``, ``output_length``, and
``hash_ids``, one for each block of ``--block-tokens`` tokens (512 in Mooncake's traces, and in ``kvrouter
simulate``). As in Dynamo's traces of agents, ``wait_for`` names the requests that must end first, and
``tool_wait_ms`` is the time after that; a sub-agent is a ``session_id`` of its own, for which the main agent waits.
``context_mode`` states that prompts are whole, for aiperf. aiperf 0.13.0 does not support it: its ``profile`` needs
lines without ``session_id``. ``--scale`` multiplies all numbers of tokens, for small models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SESSIONS = 393
MEDIAN_TURNS, MEDIAN_INPUT, MEDIAN_OUTPUT = 43, 142_016, 444
SUB_AGENT_SESSIONS = 0.44
MEDIAN_TOOL_SECONDS = 4.9
SPAN_SECONDS = 4 * 3600.0  # all sessions begin within this time

# Not published: spreads are standard deviations of logarithms.
TURNS_SPREAD, OUTPUT_SPREAD, TOOL_SPREAD = 1.0, 1.1, 1.2
TOOL_RESULT, RESULT_SPREAD = 900, 1.2
BASE, SUB_AGENT_BASE = 20_000, 12_000  # tokens of instructions and tools
SUMMARY = 8_000
LIMITS = (200_000, 990_000)  # a session has one of them; then the agent summarises its context
SUB_AGENT_TURNS, MEAN_SUB_AGENTS = 12, 4
TOKENS_PER_SECOND = 60

Row = dict[str, Any]


@dataclass
class Turn:
    """One request, before its lengths are scaled. Its first ``reused`` prompt tokens are those of the last prompt."""

    request_id: str
    start: float
    tokens: float
    reused: float
    output: float
    wait_for: list[str]
    tool_seconds: float

    @property
    def end(self) -> float:
        """When its response would end at 1 s for the prompt and ``TOKENS_PER_SECOND``."""
        return self.start + 1 + self.output / TOKENS_PER_SECOND


@dataclass
class Agent:
    """A main agent or a sub-agent, with its turns."""

    session_id: str
    base: float
    limit: float
    turns: list[Turn] = field(default_factory=list)

    def add_turn(self, dice: random.Random, start: float, wait_for: list[str], tool_seconds: float) -> Turn:
        """Add a turn. Its prompt is the previous prompt and response, and a tool's result; or a summary of all this."""
        if self.turns:
            reused = self.turns[-1].tokens
            tokens = reused + self.turns[-1].output + draw(dice, TOOL_RESULT, RESULT_SPREAD)
            if tokens > self.limit:
                reused, tokens = self.base, self.base + SUMMARY
        else:
            reused, tokens = 0.0, self.base + draw(dice, TOOL_RESULT, RESULT_SPREAD)
        output = draw(dice, MEDIAN_OUTPUT, OUTPUT_SPREAD)
        turn = Turn(f"{self.session_id}-{len(self.turns)}", start, tokens, reused, output, wait_for, tool_seconds)
        self.turns.append(turn)
        return turn


def draw(dice: random.Random, median: float, spread: float) -> float:
    """Return a random number with a log-normal distribution."""
    return median * math.exp(dice.gauss(0, spread))


def draw_turns(dice: random.Random, sessions: int) -> list[int]:
    """Return each session's number of turns: evenly spaced quantiles of the distribution, in random order."""
    normal = statistics.NormalDist()
    shares = [(number + 0.5) / sessions for number in range(sessions)]
    turns = [max(1, round(MEDIAN_TURNS * math.exp(TURNS_SPREAD * normal.inv_cdf(share)))) for share in shares]
    dice.shuffle(turns)
    return turns


def make_session(dice: random.Random, name: str, start: float, turns: int, sub_agents: int) -> list[Agent]:
    """Return the main agent of a session and its sub-agents."""
    main = Agent(name, BASE, dice.choice(LIMITS))
    agents = [main]
    spawning = sorted(dice.randrange(turns) for _ in range(sub_agents))
    at, wait_for, tool_seconds = start, list[str](), 0.0
    for number in range(turns):
        turn = main.add_turn(dice, at, wait_for, tool_seconds)
        ends = [turn]
        for _ in range(spawning.count(number)):
            agent = Agent(f"{name}-agent{len(agents)}", SUB_AGENT_BASE, LIMITS[0])
            agents.append(agent)
            last = turn
            for _ in range(max(1, round(draw(dice, SUB_AGENT_TURNS, 0.7)))):
                pause = draw(dice, MEDIAN_TOOL_SECONDS, TOOL_SPREAD)
                last = agent.add_turn(dice, last.end + pause, [last.request_id], pause)
            ends.append(last)
        tool_seconds = draw(dice, MEDIAN_TOOL_SECONDS, TOOL_SPREAD)
        at, wait_for = max(each.end for each in ends) + tool_seconds, [each.request_id for each in ends]
    return agents


def make_agents(seed: int, sessions: int) -> list[Agent]:
    """Return all agents of the trace."""
    dice = random.Random(seed)
    starts = sorted(dice.uniform(0, SPAN_SECONDS * sessions / SESSIONS) for _ in range(sessions))
    with_sub_agents = set(dice.sample(range(sessions), round(SUB_AGENT_SESSIONS * sessions)))
    agents: list[Agent] = []
    for number, (start, turns) in enumerate(zip(starts, draw_turns(dice, sessions), strict=True)):
        sub_agents = 1 + round(dice.expovariate(1 / (MEAN_SUB_AGENTS - 1))) if number in with_sub_agents else 0
        agents += make_session(dice, f"session{number}", start, turns, sub_agents)
    return agents


def make_trace(seed: int = 0, sessions: int = SESSIONS, scale: float = 1.0, block_tokens: int = 512) -> list[Row]:
    """Return the lines of the trace, by time."""
    agents = make_agents(seed, sessions)
    factor = scale * MEDIAN_INPUT / statistics.median(turn.tokens for agent in agents for turn in agent.turns)
    ids = itertools.count()
    rows = [row for agent in agents for row in make_rows(agent, factor, scale, block_tokens, ids)]
    return sorted(rows, key=lambda row: row["timestamp"])


def make_rows(agent: Agent, factor: float, scale: float, block_tokens: int, ids: Iterator[int]) -> Iterator[Row]:
    """Yield the lines of one agent. A block that is not full has an id of its own, because the next prompt fills it."""
    full: list[int] = []
    for turn in agent.turns:
        tokens = max(1, round(factor * turn.tokens))
        del full[int(factor * turn.reused) // block_tokens :]
        full += itertools.islice(ids, tokens // block_tokens - len(full))
        yield {
            "request_id": turn.request_id,
            "session_id": agent.session_id,
            "timestamp": round(1000 * turn.start),
            "input_length": tokens,
            "output_length": max(1, round(scale * turn.output)),
            "hash_ids": [*full, next(ids)] if tokens % block_tokens else list(full),
            "wait_for": turn.wait_for,
            "tool_wait_ms": round(1000 * turn.tool_seconds),
            "context_mode": "message_array_with_responses",
        }


def describe(rows: Sequence[Row], block_tokens: int = 512) -> dict[str, float]:
    """Return the figures of a trace that AgentX has published."""
    turns: dict[str, int] = {}
    known: set[int] = set()
    cached = 0
    for row in rows:
        main = row["session_id"].partition("-agent")[0]
        turns[main] = turns.get(main, 0) + (row["session_id"] == main)
        leading = itertools.takewhile(known.__contains__, row["hash_ids"])
        cached += min(row["input_length"], block_tokens * sum(1 for _ in leading))
        known.update(row["hash_ids"])
    with_sub_agents = {row["session_id"].partition("-agent")[0] for row in rows if "-agent" in row["session_id"]}
    return {
        "requests": len(rows),
        "sessions": len(turns),
        "turns, median": statistics.median(turns.values()),
        "input tokens, median": statistics.median(row["input_length"] for row in rows),
        "output tokens, median": statistics.median(row["output_length"] for row in rows),
        "share of prefix hits": cached / sum(row["input_length"] for row in rows),
        "share of sessions with sub-agents": len(with_sub_agents) / len(turns),
        "tool pause, median s": statistics.median(row["tool_wait_ms"] for row in rows if row["wait_for"]) / 1000,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the trace, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all numbers of tokens (default 1)")
    parser.add_argument("--block-tokens", type=int, default=512, help="tokens of one entry of hash_ids (default 512)")
    options = parser.parse_args(argv)
    rows = make_trace(options.seed, options.sessions, options.scale, options.block_tokens)
    with options.output.open("w") as output:
        output.writelines(json.dumps(row) + "\n" for row in rows)
    for name, value in describe(rows, options.block_tokens).items():
        print(f"{name}: {value:,.3f}" if value < 10 else f"{name}: {value:,.0f}")


if __name__ == "__main__":
    main()
