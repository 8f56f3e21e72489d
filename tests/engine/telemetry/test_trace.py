"""The debug log has the source of each prompt token, and the reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.stores.memory import MemoryStore
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.faulty_store import Fault, FaultyStore
from tests.engine.pair import PROMPT, Pair, collect_pieces, empty_prefix_cache, pair_of
from tests.engine.running import Engine

BLOCK_BYTES = r"[1-9]\d*"


class DebugLog:
    """The debug lines of the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def lines(self, name: str) -> list[str]:
        """Return the lines of this request, in order."""
        found = [each.getMessage() for each in self._caplog.records if each.levelno == logging.DEBUG]
        return [line.removeprefix(f"request {name}: ") for line in found if line.startswith(f"request {name}: ")]

    def has(self, name: str, pattern: str) -> bool:
        return any(re.fullmatch(pattern, line) for line in self.lines(name))

    def sources(self, name: str) -> list[str]:
        """Return the final lines, one for each instance."""
        return [line for line in self.lines(name) if line.startswith("prompt of ")]


@pytest.fixture
def debug_log(caplog: pytest.LogCaptureFixture) -> Iterator[DebugLog]:
    with caplog.at_level(logging.DEBUG, "engine"), caplog.at_level(logging.DEBUG, "kvstore_backend"):
        yield DebugLog(caplog)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore(64 << 20))


@in_event_loop
async def test_the_log_of_a_prompt_from_the_pool(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, debug_log: DebugLog
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, store=store) as pair:
        await run_on_one_instance(pair, "first")
        empty_prefix_cache(pair.prefill.engine)
        await run_on_one_instance(pair, "second")
        await run_on_one_instance(pair, "third")
    assert debug_log.has("first", r"look-up of blocks 0 to 5 of the prompt \(first hash: \w{12}\): the pool has 0 .*")
    saves = [re.match(r"save of blocks .*: the pool has (\d) of (\d) now", line) for line in debug_log.lines("first")]
    assert [sum(int(found[i]) for found in saves if found) for i in (1, 2)] == [6, 6]
    assert debug_log.has("second", rf"load of 6 blocks: 6 arrived and were verified, {BLOCK_BYTES} bytes in \d+\.\d ms")
    tail = "the last 4 do not fill a block before the last token, which is always computed"
    assert debug_log.sources("first") == [
        "prompt of 100 tokens: 100 computed here (0 to 99); because "
        "pool: not in the pool (it lacks the first of 6 blocks)"
    ]
    assert debug_log.sources("second") == [
        "prompt of 100 tokens: 96 from the pool (0 to 95), 4 computed here (96 to 99); because "
        f"pool: the pool had 6 of 6 blocks, of which 6 arrived; {tail}"
    ]
    assert debug_log.sources("third") == [
        "prompt of 100 tokens: 96 from own cache (0 to 95), 4 computed here (96 to 99); because "
        f"pool: own cache had all 6 blocks; {tail}"
    ]


async def run_on_one_instance(pair: Pair, name: str) -> None:
    generations = pair.prefill.generations
    await collect_pieces(generations.begin(pair.start(name=name)[0].request, None))
    await eventually(lambda: pair.prefill.is_free, "the prompt to be saved")


@in_event_loop
async def test_the_log_of_a_direct_transfer(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, debug_log: DebugLog
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, store=store) as pair:
        await pair.answer(name="a")
        await pair.answer([*PROMPT, *PROMPT], name="b")
        assert pair.decode.engine.metric("kvstore_pool_unused_requests_total", reason="handed_over") == 2
    assert debug_log.has(
        "b",
        r"the prefill instance begins a direct transfer of 200 tokens; 7 blocks are reserved, the 6 blocks "
        r"before them are in this instance's own cache",
    )
    assert debug_log.has("b", r"the decode instance at \S+ reserves 7 blocks, and has the 6 blocks before them already")
    assert debug_log.has(
        "b",
        rf"direct transfer of blocks \d+ to 12: \d written, {BLOCK_BYTES} bytes in .* ms; the decode instance had \d "
        r".*",
    )
    assert debug_log.has("b", rf"direct transfer accepted: 7 blocks written, {BLOCK_BYTES} bytes, .* ms since it began")
    assert debug_log.has("b", rf"direct transfer verified: 7 blocks, {BLOCK_BYTES} bytes in .* ms")
    prefill, decode = sorted(debug_log.sources("b"), key=lambda line: "KV from prefill" in line)
    assert prefill.startswith(
        "prompt of 200 tokens: 96 from own cache (0 to 95), 104 computed here (96 to 199); because"
    )
    assert decode == (
        "prompt of 200 tokens: 96 from own cache (0 to 95), 104 from the prefill instance (96 to 199); because "
        "pool: not looked up; the prefill instance transferred the prompt directly; "
        "KV from prefill: directly; the prefill instance took 96 tokens from its own cache and 0 from the pool"
    )


@in_event_loop
async def test_the_log_of_a_failed_direct_transfer_has_the_way_of_the_hand_over(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, debug_log: DebugLog
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, store=store) as pair:
        pair.prefill.transfer.fails = True
        await pair.answer()
    assert debug_log.has("r", "KV transferred through the pool, because a write to the decode instance failed")
    assert debug_log.has("r", "the prefill instance has saved the prompt to the pool")
    decode = next(line for line in debug_log.sources("r") if "KV from prefill" in line)
    assert decode.startswith(
        "prompt of 100 tokens: 96 from the pool (0 to 95), 4 computed here (96 to 99); because pool:"
    )
    assert "KV from prefill: through the pool; the prefill instance took 0 tokens from its own cache and 0" in decode


def test_the_log_of_a_refused_save(tiny_checkpoint: Path, store: FaultyStore, debug_log: DebugLog) -> None:
    store.fault = Fault.REFUSES_SAVES
    with Engine(tiny_checkpoint, store=store) as engine:
        engine.answer(PROMPT, 1)
    assert debug_log.has("0", r"save of blocks 0 to 0 .*: the pool has 0 of 1 now, 0 bytes; .* ms")


@in_event_loop
async def test_the_log_has_no_such_lines_without_debug(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine"):
        async with pair_of(tiny_checkpoint, word_tokenizer, store=store) as pair:
            await pair.answer()
    assert "request finished: request_id=r" in caplog.text
    assert "request r:" not in caplog.text
