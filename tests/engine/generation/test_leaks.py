"""A leg that ends at any time, by a disconnect or a fault, releases all blocks and reservations."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from simulation.actors.dialects import SglangDialect, VllmDialect, retained_prompts_of
from tests.engine.cancelled import CancelledAt
from tests.engine.dialects.pairs import DialectPair, dialect_pair, prompt_of
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.pair import HOST, collect_pieces, pair_of

KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def cancel_at_every_await(legs: Any, leg: int, until_free: Any) -> int:
    """Cancel leg number ``leg`` at each of its awaits, in a new pair of legs each time; return the number of awaits."""
    for number in itertools.count():
        coroutines: list[Coroutine[Any, Any, Any]] = list(legs(number))
        cancelled = CancelledAt(coroutines[leg], number)

        async def run(each: CancelledAt = cancelled) -> Any:
            return await each

        coroutines[leg] = run()
        tasks = [asyncio.ensure_future(each) for each in coroutines]
        await asyncio.wait([tasks[leg]])
        if cancelled.is_cancelled:
            for task in tasks:  # the client disconnects, and then the router cancels the other leg
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_free()
        if not cancelled.is_cancelled:
            return number
    raise AssertionError("not reached")


@pytest.mark.parametrize("leg", [0, 1], ids=["prefill", "decode"])
@in_event_loop
async def test_a_leg_of_a_direct_transfer_releases_all_at_any_cancellation(
    tiny_checkpoint: Path, word_tokenizer: Any, leg: int
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, expiry_seconds=0.2) as pair:

        def legs(number: int) -> tuple[Coroutine[Any, Any, Any], ...]:
            both = pair.start(prompt_of(100, number), 4, f"r{leg}-{number}")
            return tuple(map(collect_pieces, both))

        async def until_free() -> None:
            await pair.until_free()
            await eventually(lambda: pair.decode.receiver.num_pending == 0, "no pending transfers")
            assert pair.decode.num_reserved == 0

        assert await cancel_at_every_await(legs, leg, until_free) >= 2


@contextlib.asynccontextmanager
async def sglang_pair(folder: Path, tokenizer: Any) -> AsyncIterator[DialectPair]:
    async with dialect_pair(folder, tokenizer, SglangDialect, expiry_seconds=0.2) as pair:
        yield pair


@pytest.mark.parametrize("leg", [0, 1], ids=["prefill", "decode"])
@in_event_loop
async def test_a_leg_of_an_sglang_pair_releases_all_at_any_cancellation(
    tiny_checkpoint: Path, word_tokenizer: Any, leg: int
) -> None:
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:

        def legs(number: int) -> tuple[Coroutine[Any, Any, Any], ...]:
            room = {"bootstrap_host": HOST, "bootstrap_port": pair.prefill.side.receiver.port, "bootstrap_room": number}
            fields = {"prompt": prompt_of(100, number), "max_tokens": 4, **room}
            return pair.prefill.complete(**fields), pair.decode.complete(**fields)

        async def until_free() -> None:
            await wait_until_all_is_released(pair)

        assert await cancel_at_every_await(legs, leg, until_free) >= 2


class HeldSteps:
    """Steps of the engine. After its computation, the step with number ``hold_at`` waits for ``release``."""

    def __init__(self, runner: Any) -> None:
        self.hold_at = -1
        self.count = 0
        self.is_held = threading.Event()
        self.release = threading.Event()
        self._run = runner.run

    def run(self, chunks: Any) -> Any:
        choices = self._run(chunks)
        self.count += 1
        if self.count - 1 == self.hold_at:
            self.is_held.set()
            self.release.wait()
        return choices

    def hold_next(self, number: int) -> None:
        """Hold the step with this number, counted from now."""
        self.count, self.hold_at = 0, number
        self.is_held.clear()
        self.release.clear()


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "fastdeploy"])
@in_event_loop
async def test_a_disconnect_while_a_chunk_is_computed_releases_all_blocks(
    tiny_checkpoint: Path, word_tokenizer: Any, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: dict[str, Any] = {"vllm": lambda _, port: VllmDialect(HOST, port), "sglang": SglangDialect}
    make = makers.get(dialect, lambda *_: None)
    async with dialect_pair(tiny_checkpoint, word_tokenizer, make, expiry_seconds=0.2) as pair:
        runner = pair.prefill.side.engine.runner
        steps = HeldSteps(runner)
        monkeypatch.setattr(runner, "run", steps.run)
        for number in range(5):  # 100 tokens, 24 per step
            fields: dict[str, Any] = {"prompt": prompt_of(100, 10 * number), "max_tokens": 1}
            if dialect == "vllm":
                fields["kv_transfer_params"] = KEEP
            elif dialect == "sglang":
                port = pair.prefill.side.receiver.port
                fields |= {"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": number}
            else:
                fields["disaggregate_info"] = pair.pair.info.model_dump()
            steps.hold_next(number)
            task = asyncio.ensure_future(pair.prefill.complete(**fields))
            await eventually(steps.is_held.is_set, f"step {number}")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            steps.release.set()
            await wait_until_all_is_released(pair)


async def wait_until_all_is_released(pair: DialectPair) -> None:
    """Wait until there is no block in use, reservation, transfer or retained prompt."""
    await pair.pair.until_free()
    prefill, decode = pair.prefill.side.receiver, pair.decode.side.receiver
    await eventually(
        lambda: not (len(retained_prompts_of(prefill)) or prefill.num_pending or decode.num_pending), "nothing pending"
    )
    assert pair.decode.side.num_reserved == 0


@in_event_loop
async def test_a_fault_before_the_engine_has_the_sequence_cancels_the_reservation(
    tiny_checkpoint: Path, word_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        prefill, decode = pair.start()

        def fail() -> Any:
            raise UnicodeError("no such token")

        monkeypatch.setattr(decode, "_make_detokenizer", fail)
        answers = await asyncio.gather(collect_pieces(prefill), collect_pieces(decode), return_exceptions=True)
        assert isinstance(answers[1], UnicodeError)
        await pair.until_free()
        assert pair.decode.num_reserved == 0
