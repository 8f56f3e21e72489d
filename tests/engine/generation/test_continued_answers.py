"""Another instance continues an interrupted response with the same tokens, from its tokens or from its text.

The checkpoint generates words, and characters of two to four tokens, so some interruptions are within a character.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.apis.completions import Completions
from engine.disaggregation import HandoverReceiver
from engine.generation import Generations, SharedParts
from engine.model.checkpoint import load_tokenizer
from engine.protocol import ApiError, ChatBody, CompletionBody, check_body
from tests.engine.event_loop import in_event_loop
from tests.engine.running import Engine

LENGTH = 64
MESSAGES = [{"role": "user", "content": "Where is the river?"}]


@dataclass(frozen=True)
class Whole:
    """The response without an interruption."""

    prompt: list[int]
    tokens: list[int]
    text: str


@pytest.fixture(scope="module")
def engine(characters_in_parts: Path) -> Iterator[Engine]:
    with Engine(characters_in_parts, num_blocks=512, max_num_seqs=64, budget=512) as running:
        yield running


@pytest.fixture(scope="module")
def completions(engine: Engine, characters_in_parts: Path) -> Completions:
    tokenizer = load_tokenizer(str(characters_in_parts))
    generations = Generations(SharedParts(engine.core, tokenizer, "mixed", engine.block_size, HandoverReceiver()))
    return Completions(generations, tokenizer, "parts", 400, engine.runner.vocab_size)


async def answer(completions: Completions, **fields: Any) -> Any:
    """Send a request; return the only choice of its response."""
    fields = {"temperature": 0, "return_token_ids": True, "max_tokens": LENGTH, **fields}
    if "messages" in fields:
        response = await completions.begin_chat(check_body(ChatBody, fields))
    else:
        response = await completions.begin_completion(check_body(CompletionBody, fields))
    (choice,) = (await response.collect_whole())["choices"]
    return choice | choice.pop("message", {})


async def whole_answer(completions: Completions, **fields: Any) -> Whole:
    choice = await answer(completions, messages=MESSAGES, **fields)
    text = choice["content"]
    return Whole(choice["prompt_token_ids"], choice["completion_token_ids"], text)


@functools.cache
def text_of(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    """Return the text that a client has of an interrupted response: only complete characters."""
    return str(tokenizer.decode(tokens)).rstrip("\ufffd")


@in_event_loop
async def test_the_response_has_characters_of_several_tokens(completions: Completions) -> None:
    whole = await whole_answer(completions)
    assert "\ufffd" not in whole.text
    cut = [end for end in range(LENGTH) if completions.tokenizer.decode(whole.tokens[:end]).endswith("\ufffd")]
    assert len(cut) >= 6, whole.text


@in_event_loop
async def test_a_completion_continues_from_a_prompt_of_token_ids(completions: Completions) -> None:
    whole = await whole_answer(completions)

    async def check_cut(end: int) -> None:
        rest = await answer(completions, prompt=whole.prompt + whole.tokens[:end], max_tokens=LENGTH - end)
        assert rest["completion_token_ids"] == whole.tokens[end:], end
        assert text_of(completions.tokenizer, tuple(whole.tokens[:end])) + rest["text"] == whole.text, end

    await asyncio.gather(*map(check_cut, range(LENGTH)))


@in_event_loop
async def test_chat_continues_from_the_tokens_generated_before(completions: Completions) -> None:
    whole = await whole_answer(completions)

    async def check_cut(end: int) -> None:
        fields = {"completion_token_ids": whole.tokens[:end], "max_tokens": LENGTH - end}
        rest = await answer(completions, messages=MESSAGES, **fields)
        assert rest["completion_token_ids"] == whole.tokens[end:], end
        assert text_of(completions.tokenizer, tuple(whole.tokens[:end])) + rest["content"] == whole.text, end

    await asyncio.gather(*map(check_cut, range(LENGTH)))


@in_event_loop
async def test_chat_continues_from_the_text_of_its_last_message(completions: Completions) -> None:
    whole, tokenizer = await whole_answer(completions), completions.tokenizer

    async def check_cut(end: int) -> None:
        text = text_of(tokenizer, tuple(whole.tokens[:end]))
        num_tokens = next(i for i in range(end + 1) if tokenizer.decode(whole.tokens[:i]) == text)
        rest = await answer(
            completions,
            messages=[*MESSAGES, {"role": "assistant", "content": text}],
            continue_final_message=True,
            add_generation_prompt=False,
            max_tokens=LENGTH - num_tokens,
        )
        assert rest["prompt_token_ids"] == whole.prompt + whole.tokens[:num_tokens], end
        assert rest["completion_token_ids"] == whole.tokens[num_tokens:], end
        assert text + rest["content"] == whole.text, end

    await asyncio.gather(*map(check_cut, range(LENGTH)))


@in_event_loop
async def test_text_that_might_begin_a_stop_string_is_not_lost(completions: Completions) -> None:
    """The last token ends with the beginning of a stop string, so the client has only the text before it."""
    whole = await whole_answer(completions)
    words = [completions.tokenizer.decode([token]) for token in whole.tokens]
    end = next(i for i in range(8, LENGTH) if words[i].isascii() and len(words[i]) > 2) + 1
    stop = words[end - 1][-2:] + "never generated"
    rest = await answer(
        completions,
        messages=MESSAGES,
        completion_token_ids=whole.tokens[:end],
        max_tokens=LENGTH - end,
        stop=[stop],
    )
    given = completions.tokenizer.decode(whole.tokens[:end])[:-2]
    assert given + rest["content"] == whole.text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": MESSAGES}, "the last of several messages must be the assistant's, with a text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last of several messages must be"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": None}]}, "the last of several messages must be"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}], "add_generation_prompt": True},
            "continue_final_message: it is true, and so is add_generation_prompt; give false for one of them",
        ),
    ],
)
@in_event_loop
async def test_only_a_text_of_the_assistant_is_continued(
    completions: Completions, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ApiError, match=sentence):
        await answer(completions, continue_final_message=True, **{"add_generation_prompt": False, **fields})


@in_event_loop
async def test_a_prompt_without_a_generation_prompt_ends_earlier(completions: Completions) -> None:
    with_prompt = await answer(completions, messages=MESSAGES, max_tokens=1)
    without_prompt = await answer(completions, messages=MESSAGES, max_tokens=1, add_generation_prompt=False)
    shorter = without_prompt["prompt_token_ids"]
    assert with_prompt["prompt_token_ids"][: len(shorter)] == shorter != with_prompt["prompt_token_ids"]
