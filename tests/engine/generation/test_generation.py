"""One request in an instance, and in a pair with a pool."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.disaggregation import HandoverReceiver
from engine.generation import Generation, Generations, Piece, SharedParts
from engine.protocol import DisaggregateInfo
from engine.scheduling.request import Request, SamplingParams
from kvstore_backend import StorageBackend
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.write_behind import WriteBehindBackend
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.faulty_store import FaultyStore
from tests.engine.running import Engine

PROMPT = tuple(range(1, 101))
CACHEABLE = 96
HOST = "127.0.0.1"


def request_of(request_id: str = "r", max_tokens: int = 12, **params: Any) -> Request:
    return Request(request_id, PROMPT, SamplingParams(max_tokens, temperature=0, **params))


async def collect_pieces(generation: Generation) -> list[Piece]:
    return [piece async for piece in generation.pieces()]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def generations_of(engine: Engine, tokenizer: Any, role: str, receiver: HandoverReceiver | None = None) -> Generations:
    return Generations(SharedParts(engine.core, tokenizer, role, engine.block_size, receiver or HandoverReceiver()))


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint) as running:
        yield running


@pytest.fixture
def alone(engine: Engine, word_tokenizer: Any) -> Generations:
    """A mixed instance. Its tokenizer decodes the tokens of the tiny model to bytes and beginnings of words."""
    return generations_of(engine, word_tokenizer, "mixed")


class Pair:
    """A prefill and a decode instance with one pool."""

    def __init__(self, prefill: Engine, decode: Engine, tokenizer: Any, receiver: HandoverReceiver) -> None:
        self.prefill = generations_of(prefill, tokenizer, "prefill")
        self.decode = generations_of(decode, tokenizer, "decode", receiver)
        self.prefill_engine, self.decode_engine = prefill, decode
        self.receiver = receiver
        self.info = DisaggregateInfo(decode_ip=HOST, decode_connector_port=receiver.port)

    def start(self, info: DisaggregateInfo | None = None) -> tuple[Generation, Generation]:
        info = info or self.info
        return self.prefill.begin(request_of(), info), self.decode.begin(request_of(), info)

    async def start_waiting(self) -> asyncio.Task[list[Piece]]:
        """Start decode's leg of a request; return when it waits for prefill."""
        _, decode = self.start()
        task = asyncio.create_task(collect_pieces(decode))
        await eventually(lambda: self.receiver.num_pending, "decode to wait")
        return task


@contextlib.asynccontextmanager
async def pair_over(
    store: FaultyStore,
    folder: Path,
    tokenizer: Any,
    store_of_prefill: StorageBackend | None = None,
) -> AsyncIterator[Pair]:
    receiver = HandoverReceiver(None, 30.0, 30.0)
    await receiver.start_listening(socket.create_server((HOST, 0)))
    with Engine(folder, store=store_of_prefill or store) as prefill, Engine(folder, store=store) as decode:
        yield Pair(prefill, decode, tokenizer, receiver)
    await receiver.stop_listening()
    assert not receiver.num_pending


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    faulty = FaultyStore(MemoryStore(64 << 20))
    yield faulty
    faulty.go_on()


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> list[int]:
    with Engine(tiny_checkpoint) as engine:
        return engine.answer(PROMPT, 12).wait()


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [piece.token_id for piece in pieces if piece.token_id is not None]


@in_event_loop
async def test_pieces_are_the_tokens_in_order_and_the_last_has_the_finish_reason(
    alone: Generations, word_tokenizer: Any, expected: list[int]
) -> None:
    generation = alone.begin(request_of(), None)
    pieces = await collect_pieces(generation)
    assert tokens_of(pieces) == expected
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + ["length"]
    assert text_of(pieces) == word_tokenizer.decode(expected, skip_special_tokens=True)
    assert generation.usage()["completion_tokens"] == 12


@in_event_loop
async def test_usage_counts_only_the_tokens_up_to_a_stop_string(
    alone: Generations, word_tokenizer: Any, expected: list[int]
) -> None:
    text = word_tokenizer.decode(expected[:6], skip_special_tokens=True)
    for i in range(5):
        generation = alone.begin(request_of(str(i), 200, stop=(text[-2:],)), None)
        pieces = await collect_pieces(generation)
        assert pieces[-1].finish_reason == "stop"
        assert text_of(pieces) == text.partition(text[-2:])[0]
        assert generation.usage()["completion_tokens"] == len(tokens_of(pieces))


@in_event_loop
async def test_metrics_count_a_response_with_a_stop_string_as_stopped(
    alone: Generations, engine: Engine, word_tokenizer: Any, expected: list[int]
) -> None:
    text = word_tokenizer.decode(expected[:3], skip_special_tokens=True)
    await collect_pieces(alone.begin(request_of("s", 900, stop=(text[-2:],)), None))
    await eventually(lambda: not engine.scheduler.running, "the sequence to end")
    registry = engine.metrics.registry
    assert registry.get_sample_value("kvstore_requests_finished_total", {"reason": "stop"}) == 1
    assert registry.get_sample_value("kvstore_requests_finished_total", {"reason": "abort"}) is None


@in_event_loop
async def test_closing_the_iterator_aborts_the_request(alone: Generations, engine: Engine) -> None:
    pieces = alone.begin(request_of(max_tokens=900), None).pieces()
    await anext(pieces)
    await pieces.aclose()
    await eventually(lambda: not engine.scheduler.running, "the sequence to end")
    assert alone.abort_all() == []


@in_event_loop
async def test_an_abort_by_id_ends_only_running_requests(alone: Generations, engine: Engine) -> None:
    task = asyncio.create_task(collect_pieces(alone.begin(request_of("a", 900), None)))
    await eventually(lambda: engine.scheduler.running, "the sequence to run")
    assert alone.abort_requests(["b", "chatcmpl-a_0"]) == ["a"]
    assert (await task)[-1].finish_reason == "abort"
    assert alone.abort_requests(["a"]) == []


@pytest.mark.parametrize("request_id", ["abc_0", "chatcmpl-abc", "cmpl-x-1"])
@pytest.mark.parametrize("form", ["{}", "cmpl-{}", "chatcmpl-{}_0"])
@in_event_loop
async def test_ids_with_prefixes_and_suffixes_of_clients_are_aborted(
    alone: Generations, engine: Engine, request_id: str, form: str
) -> None:
    task = asyncio.create_task(collect_pieces(alone.begin(request_of(request_id, 900), None)))
    await eventually(lambda: engine.scheduler.running, "the sequence to run")
    assert alone.abort_requests([form.format(request_id)]) == [request_id]
    assert (await task)[-1].finish_reason == "abort"


@pytest.mark.parametrize(
    "abort", [lambda generations: generations.abort_requests(["one"]), Generations.abort_all], ids=["by id", "all"]
)
@in_event_loop
async def test_all_requests_with_the_same_id_are_aborted(
    alone: Generations, engine: Engine, abort: Callable[[Generations], list[str]]
) -> None:
    tasks = [asyncio.create_task(collect_pieces(alone.begin(request_of("one", 900), None))) for _ in range(2)]
    await eventually(lambda: len(engine.scheduler.running) == 2, "the sequences to run")
    assert abort(alone) == ["one", "one"]
    assert [pieces[-1].finish_reason for pieces in await asyncio.gather(*tasks)] == ["abort", "abort"]


@in_event_loop
async def test_a_mixed_instance_ignores_the_address_of_decode(alone: Generations, expected: list[int]) -> None:
    info = DisaggregateInfo(decode_ip=HOST, decode_connector_port=1)
    assert tokens_of(await collect_pieces(alone.begin(request_of(), info))) == expected


@in_event_loop
async def test_decode_loads_the_blocks_of_prefill_from_the_pool(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, expected: list[int]
) -> None:
    async with pair_over(store, tiny_checkpoint, word_tokenizer) as pair:
        prefill, decode = pair.start()
        of_prefill, of_decode = await asyncio.gather(collect_pieces(prefill), collect_pieces(decode))
        assert tokens_of(of_prefill) == expected[:1]
        assert tokens_of(of_decode) == expected
        assert decode.sequence.pool_cached_tokens == CACHEABLE


@in_event_loop
@pytest.mark.parametrize("writes", ["direct", "behind"])
async def test_decode_begins_only_after_the_whole_prompt_is_saved(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, writes: str
) -> None:
    behind = WriteBehindBackend(store) if writes == "behind" else None
    async with pair_over(store, tiny_checkpoint, word_tokenizer, store_of_prefill=behind) as pair:
        store.hang_saves()
        prefill, decode = pair.start()
        legs = asyncio.gather(collect_pieces(prefill), collect_pieces(decode))
        await eventually(store.hanging.is_set, "a save to hang")
        await eventually(lambda: prefill.sequence.finish_reason, "prefill to end")
        assert decode.sequence.finish_reason is None
        assert decode.sequence not in pair.decode_engine.scheduler.waiting
        store.go_on()
        await legs
        assert decode.sequence.pool_cached_tokens == CACHEABLE


@in_event_loop
async def test_decode_computes_the_prompt_if_prefill_is_aborted(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, expected: list[int]
) -> None:
    async with pair_over(store, tiny_checkpoint, word_tokenizer) as pair:
        prefill, decode = pair.start()
        prefill.abort()
        of_prefill, of_decode = await asyncio.gather(collect_pieces(prefill), collect_pieces(decode))
        assert of_prefill[-1].finish_reason == "abort"
        assert tokens_of(of_decode) == expected


@in_event_loop
async def test_decode_computes_the_prompt_if_prefills_client_disconnects(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, expected: list[int]
) -> None:
    async with pair_over(store, tiny_checkpoint, word_tokenizer) as pair:
        store.hang_saves()
        prefill, decode = pair.start()
        of_prefill, of_decode = (asyncio.create_task(collect_pieces(leg)) for leg in (prefill, decode))
        await eventually(store.hanging.is_set, "a save to hang")
        of_prefill.cancel()
        assert tokens_of(await of_decode) == expected
        store.go_on()


@pytest.mark.parametrize("info", [DisaggregateInfo(), DisaggregateInfo(decode_ip=HOST, decode_connector_port=None)])
@in_event_loop
async def test_prefill_responds_without_the_address_of_decode(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, expected: list[int], info: DisaggregateInfo
) -> None:
    async with pair_over(store, tiny_checkpoint, word_tokenizer) as pair:
        prefill, _ = pair.start(info)
        assert tokens_of(await collect_pieces(prefill)) == expected[:1]


@in_event_loop
async def test_a_request_aborted_while_it_waits_for_prefill_never_runs(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore
) -> None:
    async with pair_over(store, tiny_checkpoint, word_tokenizer) as pair:
        task = await pair.start_waiting()
        assert pair.decode.abort_all() == ["r"]
        assert [piece.finish_reason for piece in await task] == ["abort"]


@in_event_loop
async def test_a_disconnect_while_decode_waits_for_prefill_ends_the_request(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore
) -> None:
    async with pair_over(store, tiny_checkpoint, word_tokenizer) as pair:
        task = await pair.start_waiting()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.decode.abort_all() == []


@in_event_loop
async def test_usage_and_log_of_prefill_have_the_same_cached_tokens(
    tiny_checkpoint: Path, word_tokenizer: Any, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients are billed by usage. The cached tokens come from no cache, the pool, the own cache, and both."""
    counts: list[tuple[int, int, int]] = []
    with caplog.at_level("INFO", "engine.generation"):
        async with pair_over(store, tiny_checkpoint, word_tokenizer) as pair:
            for clear, length in ((False, 48), (True, 100), (False, 80), (False, 100)):
                if clear:
                    pair.prefill_engine.core.clear_prefix_cache()
                request = Request(f"r{len(counts)}", PROMPT[:length], SamplingParams(4, temperature=0))
                legs = [side.begin(request, pair.info) for side in (pair.prefill, pair.decode)]
                await asyncio.gather(*map(collect_pieces, legs))
                details = legs[0].usage()["prompt_tokens_details"]
                line = next(
                    record.getMessage()
                    for record in caplog.records
                    if f"request_id={request.request_id} role=prefill" in record.getMessage()
                )
                own, pool = (
                    int(line.partition(f"{name}_cache_token_num=")[2].split()[0]) for name in ("gpu", "storage")
                )
                assert (details["own_cached_tokens"], details["pool_cached_tokens"]) == (own, pool)
                assert details["cached_tokens"] == own + pool
                assert legs[1].usage()["prompt_tokens_details"] == details
                counts.append((length, own, pool))
    assert counts == [(48, 0, 0), (100, 0, 48), (80, 64, 0), (100, 96, 0)]
