"""Completions with several prompts, as evaluation harnesses send them, through a router to real instances."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.end_to_end.cluster import Instance, Router, instance, router

KEYS = "free: sk-free\nwhole: {key: sk-whole, tokens_per_sec: 1}\nstream: {key: sk-stream, tokens_per_sec: 1}\n"
PROMPTS = ["The river runs", "Once upon a time " * 30, "Behind the hill"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[Router, list[Instance]]]:
    folder = tmp_path_factory.mktemp("served")
    keys = folder / "keys.yaml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    with router(folder, "--api-keys-file", str(keys), splitwise=False) as running:
        towards = ("--router", f"127.0.0.1:{running.port}")
        with instance(folder, model, *towards) as first, instance(folder, model, *towards) as second:
            running.wait_for(mixed=2)
            yield running, [first, second]


@pytest.fixture
def client(served: tuple[Router, list[Instance]]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="sk-free", max_retries=0, timeout=120) as found:
        yield found


def test_each_prompt_has_its_choice_and_the_usage_counts_all(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "default", "max_tokens": 8, "temperature": 0}
    alone: list[Any] = [client.completions.create(prompt=prompt, **ask) for prompt in PROMPTS]
    together: Any = client.completions.create(prompt=PROMPTS, n=2, **ask)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone for _ in range(2)]
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    ask |= {"stream": True, "stream_options": {"include_usage": True}}
    answers: Any = client.completions.create(prompt=PROMPTS, **ask)
    *chunks, last = answers
    texts = [""] * 3
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one.choices[0].text for one in alone]
    assert (last.choices, last.usage.prompt_tokens) == ([], together.usage.prompt_tokens)


def test_a_repeated_list_goes_to_the_instance_that_has_cached_its_prompts(client: openai.OpenAI) -> None:
    ids = [[(shift + i) % 250 + 3 for i in range(600)] for shift in range(3)]
    ask: dict[str, Any] = {"model": "default", "prompt": ids, "max_tokens": 1, "temperature": 0}
    cold, *warm = (client.completions.create(**ask).usage for _ in range(4))
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert [usage.prompt_tokens_details.cached_tokens for usage in warm] == [3 * 576] * 3


@pytest.mark.parametrize("form", ["whole", "stream"])
def test_the_token_limit_counts_the_output_of_all_prompts(served: tuple[Router, list[Instance]], form: str) -> None:
    url, headers = f"{served[0].url}/v1/completions", {"authorization": f"Bearer sk-{form}"}
    body = {"prompt": PROMPTS, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": form == "stream"}
    with httpx.Client(trust_env=False, timeout=120, headers=headers) as client:
        answer, refused = client.post(url, json=body), client.post(url, json=body)
    assert answer.status_code == 200
    assert b'"usage":null' not in answer.content
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 200  # for 300 output tokens, at one token per second
