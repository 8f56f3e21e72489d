"""SGLang's dialect: both instances get the request at the same time, and find each other by the bootstrap room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import ApiError
from simulation.actors.dialects import SglangDialect, retained_prompts_of
from tests.engine.dialects.pairs import DialectPair, dialect_pair, prompt_of
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.pair import HOST


@contextlib.asynccontextmanager
async def sglang_pair(folder: Path, tokenizer: Any) -> AsyncIterator[DialectPair]:
    async with dialect_pair(folder, tokenizer, SglangDialect) as pair:
        yield pair


def room_fields(pair: DialectPair, room: Any, **more: Any) -> dict[str, Any]:
    """Return the fields that the router adds for both instances."""
    port = pair.prefill.side.receiver.port
    return {"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": room, **more}


def tokens_of(whole: Any) -> list[list[int]]:
    return [choice["completion_token_ids"] for choice in whole["choices"]]


def test_the_registration_has_sglangs_engine_and_bootstrap_port() -> None:
    prefill, decode = SglangDialect("prefill", 7000), SglangDialect("decode", 7001)
    assert prefill.registration == {"engine": "sglang", "bootstrap_port": 7000}
    assert decode.registration == {"engine": "sglang"}


@pytest.mark.parametrize("first", ["prefill", "decode"])
@in_event_loop
async def test_a_pair_works_in_either_order_of_its_legs(tiny_checkpoint: Path, word_tokenizer: Any, first: str) -> None:
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:
        expected = await pair.alone.complete(temperature=2.0, seed=7)
        fields = room_fields(pair, 2**62, temperature=2.0, seed=7)
        legs = {"prefill": pair.prefill, "decode": pair.decode}
        early = asyncio.create_task(legs.pop(first).complete(**fields))
        retained, generations = retained_prompts_of(pair.prefill.side.receiver), pair.decode.side.generations
        await eventually(lambda: len(retained) or generations.num_live, "the first leg to wait")
        (late,) = [await leg.complete(**fields) for leg in legs.values()]
        answers = {first: await early}
        answer = answers.get("decode", late)
        assert tokens_of(answer) == tokens_of(expected)
        assert tokens_of(answers.get("prefill", late)) == [tokens_of(expected)[0][:1]]
        assert pair.decode.side.handed_over("direct") == 1


@in_event_loop
async def test_a_pair_works_with_choices_and_lists_of_one_member(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:
        sampled: dict[str, Any] = {"n": 2, "temperature": 2.0, "seed": 3}
        expected = tokens_of(await pair.alone.complete(**sampled))
        fields = {name: [value] for name, value in room_fields(pair, 5).items()}
        legs = [each.complete(**fields, **sampled) for each in (pair.prefill, pair.decode)]
        _, answer = await asyncio.gather(*legs)
        assert tokens_of(answer) == expected


@in_event_loop
async def test_each_of_several_prompts_has_its_own_room(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:
        prompts = [prompt_of(100, first) for first in (1, 60)]
        expected = [tokens_of(await pair.alone.complete(prompt=prompt))[0] for prompt in prompts]
        pair.prefill.side.engine.core.clear_prefix_cache()
        place = {name: [value] * 2 for name, value in room_fields(pair, 5).items()}
        fields = {**place, "bootstrap_room": [5, 6], "rid": ["r_0", "r_1"], "prompt": prompts}
        _, answer = await asyncio.gather(*(each.complete(**fields) for each in (pair.prefill, pair.decode)))
        assert tokens_of(answer) == expected
        assert pair.decode.side.handed_over("direct") == 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bootstrap_room": None}, "Disaggregated request received without bootstrap room id"),
        ({"bootstrap_room": -1}, "bootstrap_room: it is -1; give a whole number"),
        ({"bootstrap_room": 2**63}, "bootstrap_room: it is"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room: it has 2 members for 1 prompt; give one for each"),
        ({"prompt": [[1], [2]], "bootstrap_room": [5]}, "bootstrap_room: it has 1 members for 2 prompts; give one for"),
        ({"bootstrap_host": None}, "bootstrap_host: it is null"),
        ({"bootstrap_port": "x"}, 'bootstrap_port: it is "x"; give a port'),
    ],
)
@in_event_loop
async def test_decode_refuses_requests_with_invalid_room_fields(
    tiny_checkpoint: Path, word_tokenizer: Any, fields: dict[str, Any], sentence: str
) -> None:
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:
        with pytest.raises(ApiError, match=sentence):
            await pair.decode.complete(**room_fields(pair, 5, **fields))


@in_event_loop
async def test_a_room_belongs_to_one_request(
    tiny_checkpoint: Path, word_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:
        waiting = asyncio.create_task(pair.prefill.complete(**room_fields(pair, 5)))
        await eventually(lambda: len(retained_prompts_of(pair.prefill.side.receiver)), "prefill to wait")
        with pytest.raises(ApiError, match='"room 5" is in use by another request'):
            await pair.prefill.complete(**room_fields(pair, 5))
        with pytest.raises(ApiError, match="received without bootstrap room id"):
            await pair.prefill.complete()
        await pair.decode.complete(**room_fields(pair, 5))
        await waiting


@in_event_loop
async def test_a_leg_without_its_other_leg_fails(
    tiny_checkpoint: Path, word_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulation.actors.dialects.sglang.MEETING_SECONDS", 0.2)
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:
        for side, room in ((pair.prefill, 1), (pair.decode, 2)):
            with pytest.raises(ApiError) as caught:
                await side.complete(**room_fields(pair, room))
            assert caught.value.status == 500
        await pair.pair.until_free()


@pytest.mark.parametrize("aborted", ["prefill", "decode"])
@in_event_loop
async def test_a_leg_that_is_aborted_while_it_waits_releases_all(
    tiny_checkpoint: Path, word_tokenizer: Any, aborted: str
) -> None:
    async with sglang_pair(tiny_checkpoint, word_tokenizer) as pair:
        side = {"prefill": pair.prefill, "decode": pair.decode}[aborted]
        waiting = asyncio.create_task(side.complete(**room_fields(pair, 5), rid="r"))
        retained = retained_prompts_of(pair.prefill.side.receiver)
        await eventually(
            lambda: side.side.generations.num_live and (aborted == "decode" or len(retained)), "the leg to wait"
        )
        assert side.side.generations.abort_requests(["cmpl-r_0"]) == ["r"]
        assert (await waiting)["choices"][0]["finish_reason"] == "abort"
        await pair.pair.until_free()
