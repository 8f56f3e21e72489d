"""Several choices of one request: the prompt is computed once, and each choice is a separate response."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.apis.completions import Completions
from engine.disaggregation import HandoverReceiver
from engine.generation import Choices, Generations, SharedParts
from engine.protocol import ApiError, ChatBody, CompletionBody
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.retrieval_config import RetrievalConfig
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.pair import PROMPT, pair_of
from tests.engine.running import Engine

SAMPLED: dict[str, Any] = {"temperature": 2.0, "seed": 5}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint) as running:
        yield running


@pytest.fixture
def generations(engine: Engine, word_tokenizer: Any) -> Generations:
    return Generations(SharedParts(engine.core, word_tokenizer, "mixed", engine.block_size, HandoverReceiver()))


@pytest.fixture
def completions(engine: Engine, generations: Generations, word_tokenizer: Any) -> Completions:
    return Completions(generations, word_tokenizer, "tiny", 256, engine.runner.vocab_size)


async def answer(completions: Completions, **fields: Any) -> Any:
    body = {"prompt": list(PROMPT), "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    return await (await completions.begin_completion(CompletionBody.model_validate(body))).collect_whole()


async def stream(completions: Completions, **fields: Any) -> list[Any]:
    body = {"prompt": list(PROMPT), "max_tokens": 8, "temperature": 0, "return_token_ids": True, "stream": True}
    response = await completions.begin_completion(CompletionBody.model_validate(body | fields))
    *events, done = [event async for event in response.stream_events()]
    assert done == b"data: [DONE]\n\n"
    return [json.loads(event[6:]) for event in events]


def ids_of(whole: Any) -> list[list[int]]:
    return [choice["completion_token_ids"] for choice in whole["choices"]]


@in_event_loop
async def test_greedy_choices_are_equal_and_sampled_ones_differ(completions: Completions) -> None:
    greedy = await answer(completions, n=3)
    assert [choice["index"] for choice in greedy["choices"]] == [0, 1, 2]
    assert ids_of(greedy) == 3 * ids_of(await answer(completions))
    sampled = ids_of(await answer(completions, n=3, **SAMPLED))
    assert len(set(map(tuple, sampled))) == 3
    assert sampled == ids_of(await answer(completions, n=3, **SAMPLED))
    assert sampled[:1] == ids_of(await answer(completions, **SAMPLED))
    unseeded = ids_of(await answer(completions, n=3, temperature=2.0))
    assert len(set(map(tuple, unseeded))) == 3


@in_event_loop
async def test_the_prompt_is_counted_and_computed_once(engine: Engine, completions: Completions) -> None:
    engine.core.clear_prefix_cache()
    before = engine.metric("fastdeploy:prefix_gpu_cache_token_num_total")
    usage = (await answer(completions, n=3))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 24, 124)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert engine.metric("fastdeploy:prefix_gpu_cache_token_num_total") - before == 2 * 96


@in_event_loop
async def test_usage_counts_the_blocks_that_all_choices_read_with_sparse_attention(
    tiny_checkpoint: Path, word_tokenizer: Any
) -> None:
    sparse = RetrievalConfig(16, init_tokens=16, local_tokens=20, topk_percent=0.5, dense_boundary=0)
    with Engine(tiny_checkpoint, retrieval=sparse) as engine:
        generations = Generations(SharedParts(engine.core, word_tokenizer, "mixed", 16, HandoverReceiver()))
        completions = Completions(generations, word_tokenizer, "tiny", 256, engine.runner.vocab_size)
        one = (await answer(completions))["usage"]["retrieval_details"]
        three = (await answer(completions, n=3))["usage"]["retrieval_details"]
    assert three == {name: 3 * count for name, count in one.items()}


@in_event_loop
async def test_the_events_of_a_stream_contain_the_index_of_their_choice(completions: Completions) -> None:
    *chunks, last = await stream(completions, n=3, stream_options={"include_usage": True}, **SAMPLED)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 24)
    streamed: list[list[int]] = [[], [], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["completion_token_ids"]
    assert streamed == ids_of(await answer(completions, n=3, **SAMPLED))
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"] == "length"]
    assert sorted(ends) == [0, 1, 2]
    assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in chunks) == 3


@in_event_loop
async def test_chat_has_choices_too(completions: Completions) -> None:
    fields = {"messages": [{"role": "user", "content": "x"}], "prompt_token_ids": list(PROMPT), "n": 2}
    body = ChatBody.model_validate({**fields, "max_tokens": 4, "temperature": 0})
    whole = await (await completions.begin_chat(body)).collect_whole()
    assert [choice["message"]["role"] for choice in whole["choices"]] == ["assistant", "assistant"]


@in_event_loop
async def test_earlier_tokens_are_refused_with_several_choices(completions: Completions) -> None:
    with pytest.raises(ApiError, match=r"completion_token_ids: these tokens are .* of one answer, but n is 2; give 1"):
        await answer(completions, n=2, completion_token_ids=[1])


PROMPTS = [list(PROMPT), [3, 1, 4, 1, 5], [9] * 40]


@pytest.mark.parametrize("params", [{}, {"n": 2, **SAMPLED}], ids=["greedy", "seeded, two to each"])
@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids"])
@in_event_loop
async def test_several_prompts_have_the_same_responses_as_each_prompt_alone(
    engine: Engine, completions: Completions, field: str, params: dict[str, Any]
) -> None:
    alone = [await answer(completions, prompt=prompt, **params) for prompt in PROMPTS]
    engine.core.clear_prefix_cache()
    together = await answer(completions, **{"prompt": None, field: PROMPTS}, **params)
    choices = together["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    assert ids_of(together) == [ids for one in alone for ids in ids_of(one)]
    streamed = [choice["prompt_token_ids"] for choice in choices]
    assert streamed == [prompt for prompt in PROMPTS for _ in range(params.get("n", 1))]
    assert together["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(one["usage"][name] for one in alone)
    again = await answer(completions, prompt=PROMPTS, **params)
    details = again["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == details["own_cached_tokens"] == 96 + 32


@in_event_loop
async def test_a_stream_of_several_prompts_has_each_response_at_its_index(completions: Completions) -> None:
    fields: dict[str, Any] = {"prompt": PROMPTS, "n": 2, **SAMPLED}
    *chunks, last = await stream(completions, stream_options={"include_usage": True}, **fields)
    whole = await answer(completions, **fields)
    streamed: list[list[int]] = [[] for _ in range(6)]
    prompts = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["completion_token_ids"]
        if "prompt_token_ids" in choice:
            prompts[choice["index"]] = choice["prompt_token_ids"]
    assert streamed == ids_of(whole)
    assert [prompts[index] for index in range(6)] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 48
    indexes = [chunk["choices"][0]["index"] for chunk in chunks]
    assert indexes != sorted(indexes)  # the responses run at the same time


@in_event_loop
async def test_a_list_of_one_prompt_is_equal_to_the_prompt(completions: Completions) -> None:
    expected = ids_of(await answer(completions))
    assert ids_of(await answer(completions, prompt=[list(PROMPT)])) == expected


@in_event_loop
async def test_texts_in_a_list_are_tokenized_like_single_texts(completions: Completions, word_tokenizer: Any) -> None:
    texts = ["a", "bc"]  # this small model has tokens for letters
    choices = (await answer(completions, prompt=texts))["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [word_tokenizer(text)["input_ids"] for text in texts]


@in_event_loop
async def test_an_abort_of_the_request_ends_the_responses_of_all_prompts(
    engine: Engine, generations: Generations
) -> None:
    choices = begin_endless(generations, 3)
    reading = asyncio.create_task(reasons_of(choices))
    await eventually(lambda: generations.num_live >= 3, "a response of each prompt to run or wait")
    assert generations.abort_requests(["cmpl-r_0"]) == ["r"]
    assert await reading == ["abort"] * 9
    await eventually(lambda: engine.blocks.num_available == engine.blocks.num_blocks, "all blocks to be free")


@in_event_loop
async def test_a_disconnect_of_the_client_ends_the_responses_of_all_prompts(
    engine: Engine, generations: Generations
) -> None:
    async with contextlib.aclosing(begin_endless(generations, 3).pieces()) as pieces:
        async for index, _ in pieces:
            if index == 7:
                break
    assert generations.num_live == 0
    await eventually(lambda: engine.blocks.num_available == engine.blocks.num_blocks, "all blocks to be free")


@in_event_loop
async def test_a_pair_hands_over_every_prompt(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        params = SamplingParams(8, temperature=2.0, seed=5)
        requests = [Request("r", prompt, params) for prompt in (PROMPT, PROMPT[::-1])]
        requests_and_pair = [(request, pair.info) for request in requests]
        legs = [side.generations.begin_choices(requests_and_pair, 2) for side in (pair.prefill, pair.decode)]
        _, streamed = await asyncio.gather(*map(tokens_of, legs))
        alone = [pair.prefill.generations.begin_choices([(request, None)], 2) for request in requests]
        assert streamed == [tokens for choices in alone for tokens in await tokens_of(choices)]
        assert pair.decode.handed_over("direct") == 4
        assert legs[1].usage()["prompt_tokens"] == 200


@in_event_loop
async def test_an_abort_before_the_first_token_ends_all_choices(engine: Engine, generations: Generations) -> None:
    choices = begin_endless(generations)
    reading = asyncio.create_task(reasons_of(choices))
    await eventually(lambda: generations.num_live, "the first choice to run")
    generations.abort_all()
    assert await reading == ["abort", "abort", "abort"]
    await eventually(lambda: engine.blocks.num_available == engine.blocks.num_blocks, "all blocks to be free")


@in_event_loop
async def test_a_pair_hands_over_every_choice(tiny_checkpoint: Path, word_tokenizer: Any) -> None:
    async with pair_of(tiny_checkpoint, word_tokenizer) as pair:
        request = Request("r", PROMPT, SamplingParams(8, temperature=2.0, seed=5))
        legs = [side.generations.begin_choices([(request, pair.info)], 3) for side in (pair.prefill, pair.decode)]
        _, streamed = await asyncio.gather(*map(tokens_of, legs))
        alone = await tokens_of(pair.prefill.generations.begin_choices([(request, None)], 3))
        assert streamed == alone
        assert len(set(map(tuple, streamed))) == 3
        assert pair.decode.handed_over("direct") == 3
        assert legs[1].usage()["prompt_tokens"] == 100


def begin_endless(generations: Generations, num_prompts: int = 1) -> Choices:
    requests = [Request("r", PROMPT[shift:], SamplingParams(150, temperature=0)) for shift in range(num_prompts)]
    return generations.begin_choices([(request, None) for request in requests], 3)


async def reasons_of(choices: Choices) -> list[str | None]:
    return [piece.finish_reason async for _, piece in choices.pieces() if piece.finish_reason]


async def tokens_of(choices: Choices) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(len(choices))]
    async for index, piece in choices.pieces():
        if piece.token_id is not None:
            tokens[index].append(piece.token_id)
    return tokens
