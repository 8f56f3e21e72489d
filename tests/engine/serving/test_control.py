"""Orders to a running instance: what requests, its own cache and its router get of them; FastDeploy's answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.completions import Completions
from engine.dialects import FastDeployDialect
from engine.disaggregation import HandoverReceiver
from engine.generation import Generations
from engine.serving import control as control_module
from engine.serving.control import Control
from engine.serving.endpoints import create_app
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.running import Engine

LONG = {"prompt": [1, 2, 3] * 12, "max_tokens": 2, "temperature": 0}
ENDLESS = {"prompt": [4, 5, 6], "max_tokens": 190, "temperature": 0, "ignore_eos": True}


class Running:
    """An engine, the orders to it, and its HTTP paths."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.generations = Generations(engine.core, tokenizer, "mixed", engine.block_size, HandoverReceiver())
        self.changes: list[bool] = []
        self.control = Control(engine.core, self.generations, lambda: self.changes.append(self.control.is_paused))
        instance: Any = SimpleNamespace(
            run_lifespan=contextlib.nullcontext,
            core=engine.core,
            metrics=engine.metrics,
            dialect=FastDeployDialect(),
            tracer=None,
            explainer=None,
            pool_url=None,
            control=self.control,
            generations=self.generations,
            completions=Completions(self.generations, tokenizer, "tiny", 200, engine.runner.vocab_size),
        )
        self._app = create_app(instance)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://instance", timeout=60) as client:
            yield client


@pytest.fixture
def running(tiny_checkpoint: Path, word_tokenizer: Any) -> Iterator[Running]:
    with Engine(tiny_checkpoint) as engine:
        yield Running(engine, word_tokenizer)


async def order(client: httpx.AsyncClient, path: str, **more: Any) -> Any:
    """What came of an order that succeeded."""
    answer = await client.post(path, **more)
    told = answer.json()
    assert (answer.status_code, told["status"], told["error_message"]) == (200, "success", "Success"), told
    assert told["request_id"].startswith("control-")
    return told["result"]


async def is_paused(client: httpx.AsyncClient) -> bool:
    told = (await client.get("/v1/is_paused")).json()
    assert (told["status"], list(told["result"])) == ("success", ["is_paused"])
    return bool(told["result"]["is_paused"])


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class TestPause:
    @in_event_loop
    async def test_a_paused_instance_refuses_requests_in_fastdeploys_words_until_it_is_resumed(
        self, running: Running
    ) -> None:
        async with running.asking() as client:
            before = await ask(client, LONG)
            assert not await is_paused(client)
            assert await order(client, "/v1/pause") is None
            assert await is_paused(client)
            for stream in (False, True):
                refused = await client.post("/v1/completions", json={**LONG, "stream": stream})
                assert refused.status_code == 500
                assert refused.json()["error"]["message"].startswith("Request is aborted since LLM Engine is paused")
            assert (await client.get("/health")).status_code == 200
            assert await order(client, "/v1/resume") is None
            assert not await is_paused(client)
            assert (await ask(client, LONG))["choices"] == before["choices"]
        assert running.changes == [True, False]

    @in_event_loop
    async def test_requests_that_run_and_wait_end_with_abort_before_the_pause_is_answered(
        self, running: Running
    ) -> None:
        async with running.asking() as client:
            asked = [asyncio.create_task(ask(client, ENDLESS)) for _ in range(6)]  # 4 run at once
            await eventually(lambda: len(running.engine.scheduler.running) == 4, "requests to run")
            await order(client, "/v1/pause")
            assert not running.engine.scheduler.has_sequences
            assert running.generations.num_live == 0
            answers = await asyncio.gather(*asked)
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 6

    @in_event_loop
    async def test_an_answer_that_begins_as_the_instance_is_paused_ends_with_abort(self, running: Running) -> None:
        begun = running.generations.begin_choices(running.engine.begin([1, 2, 3]).sequence.request, None, 1)
        await running.control.pause()
        assert [piece.finish_reason async for _, piece in begun.pieces()] == ["abort"]
        assert not running.engine.scheduler.has_sequences

    @in_event_loop
    async def test_the_own_prefix_cache_is_empty_after_a_pause(self, running: Running) -> None:
        async with running.asking() as client:
            await ask(client, LONG)
            assert running.engine.core.count_cached_blocks()
            await order(client, "/v1/pause")
            await order(client, "/v1/resume")
            details = (await ask(client, LONG))["usage"]["prompt_tokens_details"]
        assert details["own_cached_tokens"] == 0

    @in_event_loop
    async def test_a_second_pause_and_a_second_resume_change_nothing(self, running: Running) -> None:
        async with running.asking() as client:
            for path in ("/v1/resume", "/v1/pause", "/v1/pause"):
                await order(client, path)
            assert await is_paused(client)
        assert running.changes == [True]

    @in_event_loop
    async def test_a_paused_instance_gives_no_blocks_to_a_hand_over(self, running: Running) -> None:
        await running.control.pause()
        answers: list[object] = []
        running.engine.core.reserve_blocks([b"\0" * 32], 16, answers.append)
        await eventually(lambda: bool(answers), "an answer")
        assert answers == [None]

    @in_event_loop
    async def test_what_does_not_end_is_told_and_new_requests_stay_refused(
        self, running: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_module, "_ORDER_SECONDS", 0.05)
        monkeypatch.setattr(type(running.engine.scheduler), "has_sequences", True)
        async with running.asking() as client:
            failed = await client.post("/v1/pause")
            assert (failed.status_code, failed.json()["status"], failed.json()["result"]) == (500, "error", None)
            message = failed.json()["error_message"]
            assert message.startswith(f"Failed to run control method pause: {failed.json()['request_id']} ")
            assert message.endswith("requests that run have not ended within 0.05 s")
            assert await is_paused(client)

    @in_event_loop
    async def test_an_engine_that_has_ended_cannot_be_paused(self, running: Running) -> None:
        running.engine.core.stop()
        async with running.asking() as client:
            failed = await client.post("/v1/pause")
        assert failed.json()["error_message"].endswith("this instance's engine has ended; its log says why")
