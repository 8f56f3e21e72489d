"""vLLM's dialect: prefill retains blocks, and decode gets them by the ``kv_transfer_params`` of prefill's response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import ApiError
from simulation.actors.dialects import VllmDialect
from tests.engine.dialects.pairs import Client, DialectPair, dialect_pair, prompt_of
from tests.engine.event_loop import in_event_loop
from tests.engine.pair import HOST

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@contextlib.asynccontextmanager
async def vllm_pair(folder: Path, tokenizer: Any) -> AsyncIterator[DialectPair]:
    async with dialect_pair(folder, tokenizer, lambda _, port: VllmDialect(HOST, port)) as pair:
        yield pair


async def prefill(client: Client, **fields: Any) -> Any:
    """Send prefill the request of a router; return the parameters for decode."""
    whole = await client.complete(**{**fields, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE})
    return whole["kv_transfer_params"]


def tokens_of(whole: Any) -> list[list[int]]:
    return [choice["completion_token_ids"] for choice in whole["choices"]]


def test_the_registration_has_vllms_engine_and_connector() -> None:
    dialect = VllmDialect(HOST, 7000)
    assert dialect.registration == {"engine": "vllm", "kv_connector": "nixl"}


@pytest.mark.parametrize("length", [5, 96, 100])
@in_event_loop
async def test_decode_continues_from_the_retained_prompt(
    tiny_checkpoint: Path, word_tokenizer: Any, length: int
) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        for times in (1, 2):  # the second time decode has the prompt in its own cache, too
            fields: dict[str, Any] = {"prompt": prompt_of(length), "temperature": 2.0, "seed": 7, "logprobs": 1}
            expected = await pair.alone.complete(**fields)
            params = await prefill(pair.prefill, **{**fields, "logprobs": None})
            answer = await pair.decode.complete(**fields, kv_transfer_params=params)
            assert tokens_of(answer) == tokens_of(expected)
            assert len(answer["choices"][0]["logprobs"]["tokens"]) == 8
            assert pair.decode.side.handed_over("direct") == times
            assert "kv_transfer_params" not in answer


@in_event_loop
async def test_the_parameters_are_those_of_the_nixl_connector(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        params = await prefill(pair.prefill, request_id="r")
        assert params["remote_request_id"].startswith("r-")
        (blocks,) = params["remote_block_ids"]
        assert len(blocks) == 7
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert (params["remote_host"], params["remote_port"]) == (HOST, pair.prefill.side.receiver.port)
        assert (params["tp_size"], params["remote_num_tokens"]) == (1, 100)
        again = await prefill(pair.prefill, request_id="r")
        assert again["remote_request_id"] != params["remote_request_id"]
        assert again["remote_engine_id"] == params["remote_engine_id"]
        for each in (params, again):
            await pair.decode.complete(kv_transfer_params=each)


@in_event_loop
async def test_decode_reports_the_whole_prompt_as_cached_like_vllm(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        whole = await pair.prefill.chat(max_tokens=1, kv_transfer_params=REMOTE_DECODE)
        answer = await pair.decode.chat(max_tokens=4, kv_transfer_params=whole["kv_transfer_params"])
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 99


@in_event_loop
async def test_a_prompt_is_retained_only_for_its_lease(
    tiny_checkpoint: Path, word_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulation.actors.dialects.vllm.LEASE_SECONDS", 0.05)
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        params = await prefill(pair.prefill)
        await pair.pair.until_free()
        with pytest.raises(ApiError) as caught:
            await pair.decode.complete(kv_transfer_params=params)
        assert caught.value.status == 500


@in_event_loop
async def test_a_prompt_is_handed_over_once(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        params = await prefill(pair.prefill)
        requests = [pair.decode.complete(kv_transfer_params=params) for _ in range(2)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert sorted(isinstance(each, ApiError) for each in results) == [False, True]


@in_event_loop
async def test_a_request_fails_if_the_prefill_instance_is_not_reachable(
    tiny_checkpoint: Path, word_tokenizer: Any
) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        params = await prefill(pair.prefill)
        with pytest.raises(ApiError):
            await pair.decode.complete(kv_transfer_params={**params, "remote_port": 1})
        await pair.decode.complete(kv_transfer_params=params)


@in_event_loop
async def test_incomplete_parameters_transfer_no_blocks(
    tiny_checkpoint: Path, word_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        expected = tokens_of(await pair.alone.complete())
        params = await prefill(pair.prefill)
        lacking = {name: value for name, value in params.items() if name != "remote_host"}
        for given in (lacking, {"do_remote_prefill": True}, {}):
            assert tokens_of(await pair.decode.complete(kv_transfer_params=given)) == expected
        assert caplog.text.count("Got invalid KVTransferParams") == 1
        await pair.decode.complete(kv_transfer_params=params)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stream_options": {"include_usage": True}}, "Stream options can only be defined when `stream=True`"),
        ({"min_tokens": 5}, "min_tokens: it is 5, but the answer has at most 1 tokens"),
        ({"kv_transfer_params": "x"}, "kv_transfer_params: Input should be a valid dictionary"),
    ],
)
@in_event_loop
async def test_fields_are_refused_as_vllm_does(
    tiny_checkpoint: Path, word_tokenizer: Any, fields: dict[str, Any], sentence: str
) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        with pytest.raises(ApiError, match=sentence):
            await pair.prefill.complete(**{"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE, **fields})


@pytest.mark.parametrize("n", [1, 2])
@in_event_loop
async def test_each_of_several_prompts_is_handed_over(tiny_checkpoint: Path, word_tokenizer: Any, n: int) -> None:
    async with vllm_pair(tiny_checkpoint, word_tokenizer) as pair:
        prompts = [prompt_of(100), prompt_of(40, first=2), prompt_of(70, first=3)]
        fields: dict[str, Any] = {"prompt": prompts, "n": n, "temperature": 2.0, "seed": 3}
        expected = tokens_of(await pair.alone.complete(**fields))
        params = await prefill(pair.prefill, **fields)
        assert tokens_of(await pair.decode.complete(**fields, kv_transfer_params=params)) == expected
        assert pair.decode.side.handed_over("direct") == 3 * n
