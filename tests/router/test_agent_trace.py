"""benchmarks/agent_trace.py: the trace has AgentX's published figures, and the simulator can read it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.console.simulate import main

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "agent_trace.py"
agent_trace = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_a_trace_has_the_published_figures() -> None:
    rows = agent_trace.make_trace(seed=7, block_tokens=1024)
    figures = agent_trace.describe(rows, block_tokens=1024)
    assert figures["sessions"] == 393
    assert figures["turns, median"] == pytest.approx(43, rel=0.02)
    assert figures["input tokens, median"] == pytest.approx(142_016, rel=0.01)
    assert figures["output tokens, median"] == pytest.approx(444, rel=0.03)
    assert figures["share of prefix hits"] > 0.96
    assert figures["share of sessions with sub-agents"] == pytest.approx(0.44, rel=0.01)
    assert figures["tool pause, median s"] == pytest.approx(4.9, rel=0.03)


def test_each_request_waits_for_earlier_ones_and_its_blocks_cover_its_prompt() -> None:
    rows = agent_trace.make_trace(seed=7, sessions=30, scale=0.01, block_tokens=16)
    assert rows == agent_trace.make_trace(seed=7, sessions=30, scale=0.01, block_tokens=16)
    begun: dict[str, int] = {}
    for row in rows:
        assert all(begun[each] + row["tool_wait_ms"] < row["timestamp"] for each in row["wait_for"])
        assert 16 * (len(row["hash_ids"]) - 1) < row["input_length"] <= 16 * len(row["hash_ids"])
        begun[row["request_id"]] = row["timestamp"]
    joined = [row for row in rows if len(row["wait_for"]) > 1]
    assert joined
    assert all("-agent" in row["wait_for"][-1] for row in joined)


def test_the_simulator_reads_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agents.jsonl"
    rows = agent_trace.make_trace(sessions=10)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--trace", str(path), "--headroom", "0.2", "--policy", "pool_aware"]) == 0
    assert f"{len(rows)} requests" in capsys.readouterr().out
