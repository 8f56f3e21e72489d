"""Direct hand-over between two engines over a real TransferEngine: tokens are right, and all blocks become free."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.disaggregation import Prompt
from engine.disaggregation.incoming import digest_values
from engine.protocol import DisaggregateInfo
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.request import Sequence as EngineSequence
from kvstore_backend import Span
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.pair import HOST, PROMPT, Pair, collect_pieces, pair_of, tokens_of
from tests.engine.running import Engine
from tests.support.device import TEST_DEVICE
from tests.support.ports import free_port

BLOCK = 16
SHORT = 0.3


@pytest.fixture(scope="module")
def mixed(tiny_checkpoint: Path) -> Iterator[Engine]:
    """A mixed instance, which generates the expected tokens."""
    with Engine(tiny_checkpoint) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(mixed: Engine) -> list[int]:
    return mixed.answer(PROMPT, 12).wait()


class ScriptedPrefill:
    """A simulated prefill instance. The test chooses its messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, kind: str, **members: object) -> None:
        self._writer.write(json.dumps({"type": kind, **members}).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await self._reader.readline())
        return message


@contextlib.asynccontextmanager
async def scripted_prefill(pair: Pair, **changes: object) -> AsyncIterator[ScriptedPrefill]:
    """Yield a simulated prefill instance that has begun request "r". ``changes`` are fields of its first message."""
    reader, writer = await asyncio.open_connection(HOST, pair.decode.receiver.port, limit=1 << 20)
    prefill = ScriptedPrefill(reader, writer)
    described = Prompt.of_sequence(EngineSequence(Request("r", PROMPT, SamplingParams(1)), BLOCK)).to_message()
    prefill.send("begin", **{"request_id": "r", **described, **pair.decode.memory.terms, **changes})
    try:
        yield prefill
    finally:
        writer.close()


def digest_reserved_blocks(pair: Pair, reserved: dict[str, Any]) -> list[str]:
    """Return digests that match the current contents of the blocks, without a transfer."""
    nbytes = pair.decode.engine.runner.shape.nbytes
    return digest_values([(Span(address, nbytes),) for address in reserved["addresses"]])


needs_host_memory = pytest.mark.skipif(TEST_DEVICE != "cpu", reason="the host cannot read a GPU's KV memory")
WAYS = pytest.mark.parametrize(
    "staged", [pytest.param(False, id="in KV memory", marks=needs_host_memory), pytest.param(True, id="staged")]
)


# --- without faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 2.0}, {"min_tokens": 9, "stop_token_ids": frozenset({5})}],
    ids=["greedy", "without a seed", "min_tokens"],
)
@in_event_loop
async def test_decode_does_not_compute_the_prompt(
    tiny_checkpoint: Path,
    word_tokenizer: Any,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        computed: list[int] = []
        run = pair.decode.engine.runner.run

        def count_tokens(chunks: Any) -> Any:
            computed.extend(chunk.num_tokens for chunk in chunks)
            return run(chunks)

        monkeypatch.setattr(pair.decode.engine.runner, "run", count_tokens)
        tokens = tokens_of(await pair.answer(**params))
        assert tokens == expected or params
        assert computed == [1] * 11
        assert pair.decode.handed_over("direct") == 1
        assert (
            pair.decode.bytes_handed_over
            == pair.prefill.bytes_handed_over
            == 7 * pair.decode.engine.runner.shape.nbytes
        )


@pytest.mark.parametrize("way", ["directly", "through the pool"])
@in_event_loop
async def test_both_instances_trace_the_hand_over_and_its_way(
    tiny_checkpoint: Path, word_tokenizer: Any, way: str
) -> None:
    options: dict[str, Any] = {"store": MemoryStore(64 << 20)} if way == "through the pool" else {}
    async with pair_of(tiny_checkpoint, word_tokenizer, **options) as pair:
        pair.prefill.transfer.fails = way == "through the pool"
        generations = pair.start()
        await asyncio.gather(*map(collect_pieces, generations))
        for generation in generations:
            (phase,) = generation._phases
            assert (phase.name, phase.attributes, phase.trouble) == ("hand-over", {"engine.handover": way}, "")
            assert phase.start <= phase.end


@WAYS
@in_event_loop
async def test_only_blocks_that_decode_lacks_are_written(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int], staged: bool
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, staged=staged) as pair:
        for _ in range(2):
            assert tokens_of(await pair.answer()) == expected
        # The second time, decode's prefix cache has all blocks except the last, partly filled one.
        assert pair.decode.bytes_handed_over == (7 + 1) * pair.decode.engine.runner.shape.nbytes
        assert tokens_of(await pair.answer(PROMPT[:96], 1)) == tokens_of(await pair.answer(PROMPT[:96], 1))
        assert pair.decode.bytes_handed_over == (7 + 1) * pair.decode.engine.runner.shape.nbytes
        assert pair.decode.handed_over("direct") == 4


@pytest.mark.parametrize(
    "params",
    [{"temperature": 2.0, "seed": 3}, {"min_tokens": 9, "temperature": 1.0, "seed": 4}, {"logprobs": 3}],
    ids=["seeded", "min_tokens", "logprobs"],
)
@in_event_loop
async def test_a_pair_samples_the_same_tokens_as_one_instance(
    tiny_checkpoint: Path, word_tokenizer: Any, mixed: Engine, params: dict[str, Any]
) -> None:
    alone = mixed.begin(PROMPT, 12, **params)
    outputs = [alone.next() for _ in range(12)]
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        pieces = await pair.answer(**params)
        assert tokens_of(pieces) == [output.token_id for output in outputs]
        first, expected = pieces[0].logprobs, outputs[0].logprobs
        assert (first and first.top[0][0]) == (expected and expected.top[0][0])
        assert (first and first.chosen) == pytest.approx(expected and expected.chosen, abs=1e-4)


@in_event_loop
async def test_no_request_gets_the_first_token_of_another_request_with_the_same_id(
    tiny_checkpoint: Path, word_tokenizer: Any, mixed: Engine, expected: list[int]
) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": 3, "logprobs": 2}
    alone = mixed.answer(PROMPT, 12, **drawn).wait()
    assert alone[0] != expected[0]
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        (prefill, _), (_, decode) = pair.start(), pair.start(**drawn)
        _, pieces = await asyncio.gather(collect_pieces(prefill), collect_pieces(decode))
        assert tokens_of(pieces) == alone
        assert all(piece.logprobs for piece in pieces)
        assert pair.decode.handed_over("direct") == 1


@in_event_loop
async def test_decode_samples_the_first_token_if_prefill_does_not_report_its_sampling(
    tiny_checkpoint: Path,
    word_tokenizer: Any,
    mixed: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": 3}
    alone, to_message = mixed.answer(PROMPT, 12, **drawn).wait(), Prompt.to_message
    monkeypatch.setattr(Prompt, "to_message", lambda prompt: {**to_message(prompt), "sampling": None})
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        for _ in range(2):
            assert tokens_of(await pair.answer(**drawn)) == alone
        assert pair.decode.handed_over("direct") == 2
    assert [" has an earlier version, " in text for text in caplog.messages if "sampl" in text] == [True]


@in_event_loop
async def test_usage_contains_the_cached_tokens_of_prefill(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        for own in (0, 96):
            prefill, decode = pair.start()
            await asyncio.gather(collect_pieces(prefill), collect_pieces(decode))
            assert decode.usage()["prompt_tokens_details"]["own_cached_tokens"] == own


@WAYS
@in_event_loop
async def test_more_prompts_than_can_run_at_once_all_get_responses(
    tiny_checkpoint: Path, word_tokenizer: Any, mixed: Engine, staged: bool
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, staged=staged, num_blocks=12, max_num_seqs=2) as pair:
        prompts = [[i, *PROMPT[:30]] for i in range(1, 13)]
        answers = await asyncio.gather(*(pair.answer(prompt, 20, name=str(prompt[0])) for prompt in prompts))
        assert [tokens_of(answer) for answer in answers] == [mixed.answer(prompt, 20).wait() for prompt in prompts]
        assert pair.decode.handed_over("direct") > 0


# --- with faults -----------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("fault", ["fails", "corrupts"])
@pytest.mark.parametrize("way", ["pool", "computed"])
@in_event_loop
async def test_a_prompt_with_a_failed_transfer_comes_from_the_pool_or_is_computed(
    tiny_checkpoint: Path,
    word_tokenizer: Any,
    expected: list[int],
    fault: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    staged: bool,
) -> None:
    monkeypatch.setattr("engine.disaggregation.decode.LATE_SECONDS", 0.2)
    options: dict[str, Any] = {"store": MemoryStore(64 << 20)} if way == "pool" else {}
    async with pair_of(tiny_checkpoint, word_tokenizer, staged=staged, **options) as pair:
        if fault == "fails":
            pair.prefill.transfer.fails = True
        else:
            pair.prefill.transfer.corrupts = True
        failed_before = pair.prefill.engine.metric("fastdeploy:send_cache_failed_num_total")
        assert tokens_of(await pair.answer()) == expected
        assert pair.decode.handed_over(way) == 1
        assert pair.decode.handed_over("direct") == 0
        assert pair.prefill.engine.metric("fastdeploy:send_cache_failed_num_total") == failed_before + 1


@in_event_loop
async def test_a_decode_instance_without_free_blocks_queues_the_request(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int], mixed: Engine
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, num_blocks=8) as pair:
        first = asyncio.create_task(pair.answer([7] * 40, 60, name="first"))
        await eventually(lambda: pair.decode.handed_over("direct"), "the first request to run")
        assert tokens_of(await pair.answer()) == expected
        assert pair.decode.handed_over("computed") == 1
        assert tokens_of(await first) == mixed.answer([7] * 40, 60).wait()


@in_event_loop
async def test_prefill_responds_if_decodes_connector_port_is_closed(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int]
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        info = DisaggregateInfo(decode_ip=HOST, decode_connector_port=free_port())
        request = Request("r", PROMPT, SamplingParams(12, temperature=0.0))
        assert tokens_of(await collect_pieces(pair.prefill.generations.begin(request, info))) == expected[:1]


@WAYS
@pytest.mark.parametrize("end", ["abort", "client"])
@in_event_loop
async def test_blocks_are_released_if_decodes_request_ends_during_a_transfer(
    tiny_checkpoint: Path, word_tokenizer: Any, end: str, staged: bool
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer, staged=staged) as pair:
        pair.prefill.transfer.hang()
        prefill, decode = (asyncio.create_task(collect_pieces(leg)) for leg in pair.start())
        await eventually(pair.prefill.transfer.hanging.is_set, "a write to begin")
        if end == "abort":
            assert pair.decode.generations.abort_requests(["chatcmpl-r_0"]) == ["r"]
            assert [piece.finish_reason for piece in await decode] == ["abort"]
        else:
            decode.cancel()
        # The write may still use them, so neither side releases its blocks.
        await asyncio.sleep(0)
        assert pair.decode.num_reserved == 7
        assert not pair.prefill.is_free
        pair.prefill.transfer.go_on()
        await prefill


@pytest.mark.parametrize("end", ["abort", "client"])
@in_event_loop
async def test_decode_computes_immediately_if_prefills_request_ends(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int], end: str
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        pair.prefill.transfer.hang()
        prefill, decode = pair.start()
        of_prefill, of_decode = (
            asyncio.create_task(collect_pieces(prefill)),
            asyncio.create_task(collect_pieces(decode)),
        )
        await eventually(pair.prefill.transfer.hanging.is_set, "a write to begin")
        if end == "abort":
            pair.prefill.generations.abort_requests(["r"])
        of_prefill.cancel()
        assert tokens_of(await of_decode) == expected
        assert pair.decode.num_reserved == 7
        assert not pair.prefill.is_free
        pair.prefill.transfer.go_on()


@in_event_loop
async def test_decode_does_not_use_the_blocks_of_another_prompt_with_the_same_id(
    tiny_checkpoint: Path, word_tokenizer: Any, mixed: Engine
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        prefill, _ = pair.start()
        _, decode = pair.start((*PROMPT[:-1], 200))
        _, pieces = await asyncio.gather(collect_pieces(prefill), collect_pieces(decode))
        assert tokens_of(pieces) == mixed.answer((*PROMPT[:-1], 200), 12).wait()
        assert pair.decode.handed_over("computed") == 1


@in_event_loop
async def test_two_requests_with_the_same_id_share_no_blocks(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int]
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        (prefill, first), (_, second) = pair.start(), pair.start()
        _, *answers = await asyncio.gather(collect_pieces(prefill), collect_pieces(first), collect_pieces(second))
        assert [tokens_of(answer) for answer in answers] == [expected, expected]
        assert pair.decode.handed_over("direct") <= 1


# --- a faulty prefill instance ---------------------------------------------------------------------------------


@in_event_loop
async def test_a_reservation_without_a_request_expires(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with (
        pair_of(tiny_checkpoint, word_tokenizer, expiry_seconds=SHORT) as pair,
        scripted_prefill(pair) as prefill,
    ):
        assert len((await prefill.receive())["addresses"]) == 7
        assert (await prefill.receive())["type"] == "given_up"
        assert pair.decode.num_reserved == 7
        prefill.send("stopped", clean=True)
        await pair.until_free()


@in_event_loop
async def test_decode_keeps_blocks_after_a_failure_until_prefill_reports_that_it_stopped(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int]
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair, scripted_prefill(pair) as prefill:
        assert (await prefill.receive())["type"] == "reserved"
        prefill.send("failed", reason="no reason")
        assert tokens_of(await collect_pieces(pair.start()[1])) == expected
        assert (await prefill.receive())["type"] == "given_up"
        prefill.send("alive")
        prefill.send("nonsense")
        assert pair.decode.num_reserved == 7
        prefill.send("stopped", clean=True)
        await eventually(lambda: not pair.decode.num_reserved, "the blocks to be free")


@needs_host_memory
@in_event_loop
async def test_decode_keeps_blocks_of_a_disconnected_prefill_until_late_writes_are_over_and_clears_them(
    tiny_checkpoint: Path, word_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.disaggregation.decode.LATE_SECONDS", SHORT)
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        async with scripted_prefill(pair) as prefill:
            reserved = await prefill.receive()
            kv = pair.decode.engine.runner.kv
            kv.view(-1)[(reserved["addresses"][0] - kv.data_ptr()) // kv.element_size()] = float("nan")
        assert pair.decode.num_reserved == 7
        await pair.until_free()
        assert not kv.isnan().any()


@pytest.mark.parametrize(
    "ready",
    [
        {"digests": []},
        {"digests": None},
        {"digests": ["0" * 16] * 7},
        {"digests": ["0" * 16] * 8},
        {"token": 300},
        {"token": -1},
        {"token": "1"},
        {"token": True},
        {"logprobs": [1]},
        {"logprobs": [0.0, [[-1, 0.0]]]},
        {"logprobs": [0.0, [[300, 0.0]]]},
        {"own_cached_tokens": None},
        {"own_cached_tokens": -1},
        {"own_cached_tokens": 101},
        {"pool_cached_tokens": 10**30},
        {"own_cached_tokens": 60, "pool_cached_tokens": 41},
    ],
    ids=str,
)
@in_event_loop
async def test_decode_computes_the_prompt_if_prefills_result_is_invalid(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int], ready: dict[str, Any]
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair, scripted_prefill(pair) as prefill:
        members: dict[str, Any] = {
            "token": 1,
            "logprobs": None,
            "digests": digest_reserved_blocks(pair, await prefill.receive()),
            "own_cached_tokens": 0,
            "pool_cached_tokens": 0,
        }
        prefill.send("ready", **members | ready)
        prefill.send("failed", reason="no reason")
        prefill.send("stopped", clean=True)
        assert tokens_of(await collect_pieces(pair.start()[1])) == expected
        assert pair.decode.handed_over("computed") == 1


@in_event_loop
async def test_a_prefill_that_hangs_delays_no_other_request_of_decode(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int]
) -> None:
    request = Request("own", PROMPT, SamplingParams(12, temperature=0.0))
    async with (
        pair_of(tiny_checkpoint, word_tokenizer, num_blocks=20, max_model_len=128) as pair,
        scripted_prefill(pair, request_id="all", num_tokens=19 * BLOCK, hashes=[]) as wants_all,
        scripted_prefill(pair, request_id="much", num_tokens=12 * BLOCK, hashes=[]) as wants_much,
    ):
        assert await wants_all.receive() == {"type": "refused", "reason": "not enough free blocks"}
        assert (await wants_much.receive())["type"] == "reserved"
        assert tokens_of(await collect_pieces(pair.decode.generations.begin(request, None))) == expected
        wants_much.send("failed", reason="no reason")
        wants_much.send("stopped", clean=True)


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 1, "hashes": []},
        {"num_tokens": 50},
        {"hashes": []},
        {"hashes": ["00" * 32] * 6},
    ],
    ids=["one token", "fewer tokens", "no hashes", "other hashes"],
)
@in_event_loop
async def test_a_prefill_that_describes_another_prompt_affects_no_request(
    tiny_checkpoint: Path, word_tokenizer: Any, mixed: Engine, expected: list[int], change: dict[str, Any]
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        decode = pair.decode
        request = Request("other", (1, 2, 3), SamplingParams(60, temperature=0.0))
        other = asyncio.create_task(collect_pieces(decode.generations.begin(request, None)))
        await eventually(lambda: decode.engine.scheduler.running, "the other request to run")
        async with scripted_prefill(pair, **change) as prefill:
            digests = digest_reserved_blocks(pair, await prefill.receive())
            prefill.send("ready", token=1, logprobs=None, digests=digests, own_cached_tokens=0, pool_cached_tokens=0)
            prefill.send("stopped", clean=True)
            assert tokens_of(await collect_pieces(pair.start()[1])) == expected
        assert decode.handed_over("computed") == 1
        assert tokens_of(await other) == mixed.answer((1, 2, 3), 60).wait()


@pytest.mark.parametrize("term", ["namespace", "protocol"])
@in_event_loop
async def test_decode_refuses_a_prefill_of_another_model(tiny_checkpoint: Path, word_tokenizer: Any, term: str) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        reader, writer = await asyncio.open_connection(HOST, pair.decode.receiver.port)
        prefill = ScriptedPrefill(reader, writer)
        described = Prompt.of_sequence(EngineSequence(Request("r", PROMPT, SamplingParams(1)), BLOCK)).to_message()
        prefill.send("begin", request_id="r", **described, **pair.decode.memory.terms | {term: "another"})
        assert await prefill.receive() == {
            "type": "refused",
            "reason": f"the {term} must be equal in both instances",
        }
        prefill.send("failed", reason="no reason")
        assert await reader.read() == b""
        writer.close()


# --- a faulty decode instance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reserved",
    [
        {},
        {"addresses": [1, 2]},
        {"num_cached": 8, "addresses": []},
        {"num_cached": -1},
        {"num_cached": "0"},
        {"addresses": None},
        {"addresses": [4096] * 7},
        {"session": f"{HOST}:1"},
        None,
    ],
    ids=str,
)
@in_event_loop
async def test_prefill_responds_and_releases_its_blocks_after_an_invalid_response_of_decode(
    tiny_checkpoint: Path, word_tokenizer: Any, expected: list[int], reserved: dict[str, Any] | None
) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        is_closed = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            if reserved is not None:
                target = {"session": pair.decode.transfer.session, "addresses": [4096] * 7, "num_cached": 0}
                writer.write(json.dumps({"type": "reserved", **target, **reserved}).encode() + b"\n")
                writer.write(b'{"type": "rejected"}\n')
                await reader.read()
            writer.close()
            is_closed.set()

        server = await asyncio.start_server(answer, HOST, 0)
        info = DisaggregateInfo(decode_ip=HOST, decode_connector_port=server.sockets[0].getsockname()[1])
        request = Request("r", PROMPT, SamplingParams(12, temperature=0.0))
        assert tokens_of(await collect_pieces(pair.prefill.generations.begin(request, info))) == expected[:1]
        await eventually(lambda: pair.prefill.is_free, "prefill to be free")
        await is_closed.wait()
        server.close()


@in_event_loop
async def test_a_response_can_end_with_the_first_token(
    tiny_checkpoint: Path, word_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill suppresses end tokens only if the request has ``min_tokens``."""
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        first, *_ = tokens_of(await pair.answer())
        for side in (pair.prefill, pair.decode):
            monkeypatch.setattr(side.engine.runner, "eos_token_ids", frozenset({first}))
        pieces = await pair.answer()
        assert (tokens_of(pieces), pieces[-1].finish_reason) == ([first], "stop")
        assert tokens_of(await pair.answer(min_tokens=1))[0] != first
