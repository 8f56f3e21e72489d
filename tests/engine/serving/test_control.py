"""Control commands of FastDeploy: their effects on requests, the own cache and the router, and their responses."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from engine.apis.completions import Completions
from engine.disaggregation import HandoverReceiver
from engine.generation import Generations, SharedParts
from engine.model import model_runner
from engine.scheduling.request import Request, SamplingParams
from engine.serving import control as control_module
from engine.serving.control import Control, ControlFailed
from engine.serving.endpoints import create_app
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.event_loop import eventually, in_event_loop
from tests.engine.running import Engine

LONG = {"prompt": [1, 2, 3] * 12, "max_tokens": 2, "temperature": 0}
ENDLESS = {"prompt": [4, 5, 6], "max_tokens": 190, "temperature": 0, "ignore_eos": True}


class Running:
    """An engine, its control commands, and its HTTP paths."""

    def __init__(self, engine: Engine, tokenizer: Any, *, has_dynamic_weights: bool = True) -> None:
        self.engine = engine
        receiver = HandoverReceiver()
        self.generations = Generations(SharedParts(engine.core, tokenizer, "mixed", engine.block_size, receiver))
        self.changes: list[bool] = []
        self.control = Control(
            engine.core,
            engine.runner,
            self.generations,
            lambda: self.changes.append(self.control.is_paused),
            has_dynamic_weights=has_dynamic_weights,
        )
        instance: Any = SimpleNamespace(
            run_lifespan=contextlib.nullcontext,
            core=engine.core,
            metrics=engine.metrics,
            tracer=None,
            control=self.control,
            generations=self.generations,
            completions=Completions(self.generations, tokenizer, "tiny", 200, engine.runner.vocab_size),
        )
        self._app = create_app(instance)

    @contextlib.asynccontextmanager
    async def open_client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://instance", timeout=60) as client:
            yield client


@pytest.fixture
def running(tiny_checkpoint: Path, word_tokenizer: Any) -> Iterator[Running]:
    with Engine(tiny_checkpoint) as engine:
        yield Running(engine, word_tokenizer)


async def run_command(client: httpx.AsyncClient, path: str, **more: Any) -> Any:
    """Send a command; assert that it succeeds, and return its result."""
    answer = await client.post(path, **more)
    response = answer.json()
    assert (answer.status_code, response["status"], response["error_message"]) == (200, "success", "Success"), response
    assert response["request_id"].startswith("control-")
    return response["result"]


async def is_paused(client: httpx.AsyncClient) -> bool:
    response = (await client.get("/v1/is_paused")).json()
    assert (response["status"], list(response["result"])) == ("success", ["is_paused"])
    return bool(response["result"]["is_paused"])


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class TestPause:
    @in_event_loop
    async def test_a_paused_instance_refuses_requests_with_fastdeploys_message_until_resume(
        self, running: Running
    ) -> None:
        async with running.open_client() as client:
            before = await ask(client, LONG)
            assert not await is_paused(client)
            assert await run_command(client, "/v1/pause") is None
            assert await is_paused(client)
            for stream in (False, True):
                refused = await client.post("/v1/completions", json={**LONG, "stream": stream})
                assert refused.status_code == 500
                assert refused.json()["error"]["message"].startswith("Request is aborted since LLM Engine is paused")
            assert (await client.get("/health")).status_code == 200
            assert await run_command(client, "/v1/resume") is None
            assert not await is_paused(client)
            assert (await ask(client, LONG))["choices"] == before["choices"]
        assert running.changes == [True, False]

    @in_event_loop
    async def test_running_and_waiting_requests_end_with_abort_before_the_response_to_a_pause(
        self, running: Running
    ) -> None:
        async with running.open_client() as client:
            requests = [asyncio.create_task(ask(client, ENDLESS)) for _ in range(6)]  # 4 can run at the same time
            await eventually(lambda: len(running.engine.scheduler.running) == 4, "requests to run")
            await run_command(client, "/v1/pause")
            assert not running.engine.scheduler.has_sequences
            answers = await asyncio.gather(*requests)
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 6

    @in_event_loop
    async def test_a_request_that_begins_during_a_pause_ends_with_abort(self, running: Running) -> None:
        late = Request("late", (1, 2, 3), SamplingParams(5, temperature=0.0))
        choices = running.generations.begin_choices([(late, None)], 1)
        await running.control.pause()
        assert [piece.finish_reason async for _, piece in choices.pieces()] == ["abort"]
        assert not running.engine.scheduler.has_sequences

    @in_event_loop
    async def test_a_client_that_does_not_read_its_stream_delays_no_pause(self, running: Running) -> None:
        request = Request("slow", (1, 2, 3), SamplingParams(190, temperature=0.0, ignore_eos=True))
        pieces = running.generations.begin_choices([(request, None)], 1).pieces()
        await anext(pieces)
        await running.control.pause()
        assert running.generations.num_live == 1
        assert [piece.finish_reason async for _, piece in pieces][-1] == "abort"

    @in_event_loop
    async def test_the_own_cache_is_empty_after_a_pause(self, running: Running) -> None:
        async with running.open_client() as client:
            await ask(client, LONG)
            assert running.engine.core.count_cached_blocks()
            await run_command(client, "/v1/pause")
            await run_command(client, "/v1/resume")
            details = (await ask(client, LONG))["usage"]["prompt_tokens_details"]
        assert details["own_cached_tokens"] == 0

    @in_event_loop
    async def test_a_second_pause_and_a_second_resume_change_nothing(self, running: Running) -> None:
        async with running.open_client() as client:
            for path in ("/v1/resume", "/v1/pause", "/v1/pause"):
                await run_command(client, path)
            assert await is_paused(client)
        assert running.changes == [True]

    @in_event_loop
    async def test_a_paused_instance_reserves_no_blocks_for_a_hand_over(self, running: Running) -> None:
        await running.control.pause()
        answers: list[object] = []
        running.engine.core.reserve_blocks([b"\0" * 32], 16, answers.append)
        await eventually(lambda: bool(answers), "an answer")
        assert answers == [None]

    @in_event_loop
    async def test_a_pause_fails_if_requests_do_not_end_but_new_requests_are_refused(
        self, running: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_module, "_COMMAND_SECONDS", 0.05)
        monkeypatch.setattr(type(running.engine.scheduler), "has_sequences", True)
        async with running.open_client() as client:
            failed = await client.post("/v1/pause")
            assert (failed.status_code, failed.json()["status"], failed.json()["result"]) == (500, "error", None)
            message = failed.json()["error_message"]
            assert message.startswith(f"Failed to run control method pause: {failed.json()['request_id']} ")
            assert message.endswith("running requests have not ended within 0.05 s; try again")
            assert await is_paused(client)

    @in_event_loop
    async def test_an_engine_that_has_ended_cannot_be_paused(self, running: Running) -> None:
        running.engine.core.stop()
        async with running.open_client() as client:
            failed = await client.post("/v1/pause")
        assert failed.json()["error_message"].endswith(
            "the engine of this instance has ended; the instance's log says why"
        )


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint. A trainer can write to it."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


@pytest.fixture
def trained(folder: Path, word_tokenizer: Any) -> Iterator[Running]:
    """An instance with this copy and a pool."""
    with Engine(folder, store=MemoryStore(64 << 20), has_dynamic_weights=True) as engine:
        yield Running(engine, word_tokenizer)


def train(folder: Path, factor: float = 1.5) -> None:
    """Write other weights to the folder."""
    path = folder / "model.safetensors"
    tensors = {name: tensor * factor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def answer_of(folder: Path, prompt: list[int]) -> list[int]:
    """Return the tokens that a new instance generates with the current weights."""
    with Engine(folder) as engine:
        return engine.answer(prompt, 8).wait()


class Result:
    """Runs a prompt. It has the tokens of the response, and the cached tokens by their sources."""

    def __init__(self, running: Running, prompt: list[int]) -> None:
        submitted = running.engine.answer(prompt, 8)
        self.tokens = submitted.wait()
        self.own, self.pool = submitted.sequence.own_cached_tokens, submitted.sequence.pool_cached_tokens


PROMPT = [7, 8, 9, 10] * 12


async def get_error(client: httpx.AsyncClient, path: str, **more: Any) -> str:
    """Send a command; assert that it fails, and return its error message."""
    answer = await client.post(path, **more)
    response = answer.json()
    assert (answer.status_code, response["status"], response["result"]) == (500, "error", None), response
    return str(response["error_message"])


class TestSleep:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"params": {"tags": "weight,kv_cache"}},
            {"json": {"tags": ["weight", "kv_cache"]}},
            {"json": {"tags": "kv_cache"}},
            {"params": {"tags": "weight"}},
        ],
    )
    @in_event_loop
    async def test_after_a_wake_up_responses_are_the_same_and_the_own_cache_is_empty(
        self, trained: Running, options: dict[str, Any]
    ) -> None:
        before = Result(trained, PROMPT)
        async with trained.open_client() as client:
            assert await run_command(client, "/v1/sleep", **options) == [None]
            assert await is_paused(client)
            assert await run_command(client, "/v1/wakeup", **options) == [None]
            assert not await is_paused(client)
        after = Result(trained, PROMPT)
        assert (after.tokens, after.own) == (before.tokens, 0)
        assert after.pool > 0, "the weights are the same, so blocks from the pool can be used"

    @in_event_loop
    async def test_sleep_frees_memory(self, trained: Running) -> None:
        Result(trained, PROMPT)
        runner = trained.engine.runner
        weight = weakref.ref(next(runner.model.parameters()))
        assert runner.kv.any()
        await trained.control.sleep(["weight", "kv_cache"])
        assert weight() is None
        assert not runner.kv.any(), "freed pages contain zeros"

    @in_event_loop
    async def test_an_instance_accepts_requests_only_after_all_parts_wake_up(self, trained: Running) -> None:
        async with trained.open_client() as client:
            await run_command(client, "/v1/sleep")
            await run_command(client, "/v1/wakeup", params={"tags": "kv_cache"})
            assert await is_paused(client)
            message = await get_error(client, "/v1/resume")
            assert message.endswith("this instance sleeps and has freed weight; POST /v1/wakeup first")
            assert "POST /v1/wakeup" in await get_error(client, "/v1/update_weights")
            await run_command(client, "/v1/wakeup", params={"tags": "weight"})
            assert not await is_paused(client)

    @in_event_loop
    async def test_a_wake_up_loads_new_weights(self, trained: Running, folder: Path) -> None:
        before = Result(trained, PROMPT)
        await trained.control.sleep(["weight"])
        train(folder)
        await trained.control.wake_up(["weight"])
        after = Result(trained, PROMPT)
        assert after.tokens == answer_of(folder, PROMPT) != before.tokens
        assert (after.own, after.pool) == (0, 0)

    @in_event_loop
    async def test_sleep_waits_for_blocks_in_use_and_fails_after_a_time(
        self, trained: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_module, "_BLOCKS_SECONDS", 0.05)
        held = trained.engine.blocks.allocate_blocks(1)
        with pytest.raises(
            ControlFailed, match=r"KV blocks are still being saved or transferred after 0.05 s; try " r"again"
        ):
            await trained.control.sleep(["kv_cache"])
        trained.engine.blocks.release_blocks(held)
        await trained.control.sleep(["kv_cache"])

    @in_event_loop
    async def test_an_instance_with_a_failed_sleep_cannot_resume_before_it_wakes_up(
        self, trained: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = Result(trained, PROMPT)

        def fail_to_free() -> None:
            raise OSError("madvise failed")

        async with trained.open_client() as client:
            with monkeypatch.context() as broken:
                broken.setattr(trained.engine.runner, "free_kv", fail_to_free)
                assert (await get_error(client, "/v1/sleep")).endswith("madvise failed")
            assert "POST /v1/wakeup first" in await get_error(client, "/v1/resume")
            await run_command(client, "/v1/wakeup")
        assert Result(trained, PROMPT).tokens == before.tokens

    @pytest.mark.parametrize("path", ["/v1/sleep", "/v1/wakeup"])
    @in_event_loop
    async def test_an_unknown_tag_is_refused_with_fastdeploys_message(self, trained: Running, path: str) -> None:
        async with trained.open_client() as client:
            message = await get_error(client, path, params={"tags": "weight,cache"})
            assert message.endswith("Unsupported tag [cache] in [weight,cache], expected one of ['weight', 'kv_cache']")
            refused = await client.post(path, json={"tags": 3})
            assert (refused.status_code, refused.json()["error"]) == (400, "Invalid parameter type")
            assert not await is_paused(client)


class TestUpdateWeights:
    @in_event_loop
    async def test_responses_use_the_new_weights_and_no_kv_of_the_old_ones(
        self, trained: Running, folder: Path
    ) -> None:
        old = Result(trained, PROMPT)
        assert Result(trained, PROMPT).own > 0
        train(folder)
        async with trained.open_client() as client:
            await run_command(client, "/v1/pause")
            (result,) = await run_command(client, "/v1/update_weights", json={"version": "global_step_2"})
            assert await is_paused(client), "as in FastDeploy, only a separate command resumes it"
            await run_command(client, "/v1/resume")
        assert (result["version"], result["rank"]) == ("global_step_2", 0)
        assert trained.control.version == "global_step_2"
        new = Result(trained, PROMPT)
        assert (new.own, new.pool) == (0, 0)
        assert new.tokens == answer_of(folder, PROMPT) != old.tokens
        trained.engine.core.clear_prefix_cache()
        again = Result(trained, PROMPT)
        assert (again.tokens, again.pool > 0) == (new.tokens, True), "blocks of the new weights are shared"

    @in_event_loop
    async def test_weights_with_equal_fingerprints_but_different_bytes_share_no_blocks(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fingerprint = trained.engine.runner.namespace.model
        monkeypatch.setattr(model_runner, "fingerprint_model", lambda _: fingerprint)
        Result(trained, PROMPT)
        namespaces = {trained.engine.runner.namespace}
        await trained.control.pause()
        for _ in range(2):
            train(folder)
            await trained.control.update_weights("")
            namespaces.add(trained.engine.runner.namespace)
        await trained.control.resume()
        assert len(namespaces) == 3
        new = Result(trained, PROMPT)
        assert (new.tokens, new.own, new.pool) == (answer_of(folder, PROMPT), 0, 0)

    def test_a_new_instance_shares_no_blocks_of_weights_with_equal_fingerprints_but_different_bytes(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_runner, "fingerprint_model", lambda _: "samples that are equal")
        namespaces = []
        for _ in range(2):
            with Engine(folder, has_dynamic_weights=True) as started:
                namespaces.append(started.runner.namespace)
            train(folder)
        assert namespaces[0] != namespaces[1]

    @in_event_loop
    async def test_an_update_to_the_same_weights_keeps_the_pools_blocks(self, trained: Running) -> None:
        before = Result(trained, PROMPT)
        await trained.control.pause()
        await trained.control.update_weights("")
        await trained.control.resume()
        after = Result(trained, PROMPT)
        assert (after.tokens, after.own, after.pool > 0) == (before.tokens, 0, True)

    @in_event_loop
    async def test_the_version_comes_from_the_folder_if_the_command_has_none(
        self, trained: Running, folder: Path
    ) -> None:
        assert await is_without_version(trained)
        (folder / "version.yaml").write_text("version: RL-STEP2-20261123-abc\n")
        await trained.control.pause()
        (result,) = await trained.control.update_weights("")
        assert result["version"] == trained.control.version == "RL-STEP2-20261123-abc"
        assert trained.engine.runner.namespace.weights_version.startswith("RL-STEP2-20261123-abc+")
        with Engine(folder, has_dynamic_weights=True) as started:
            assert started.runner.namespace == trained.engine.runner.namespace

    @in_event_loop
    async def test_new_files_of_a_trainer_are_not_used_before_the_update(self, trained: Running, folder: Path) -> None:
        before = Result(trained, PROMPT)
        (folder / "model.safetensors").write_bytes(b"half a file")  # in place, because the file may be mapped to memory
        trained.engine.core.clear_prefix_cache()
        trained.engine.core.scheduler.pool = False
        after = Result(trained, PROMPT)
        assert (after.tokens, after.own, after.pool) == (before.tokens, 0, 0)

    @in_event_loop
    async def test_the_instance_must_be_paused(self, trained: Running) -> None:
        async with trained.open_client() as client:
            message = await get_error(client, "/v1/update_weights", json={})
        assert message.endswith("Pause LLM Engine first before calling updating weights")

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (
                lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
                "is not a safetensors file, or it is truncated",
            ),
            (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "its configuration has"),
            (lambda folder: (folder / "version.yaml").write_text("step: 3"), "version.yaml has no version"),
            (lambda folder: drop_tensor(folder), "these are not weights of the running model: tensors are missing"),
        ],
    )
    @in_event_loop
    async def test_the_old_weights_remain_if_the_new_ones_are_invalid(
        self, trained: Running, folder: Path, damage: Callable[[Path], object], message: str
    ) -> None:
        before = Result(trained, PROMPT)
        damage(folder)
        async with trained.open_client() as client:
            await run_command(client, "/v1/pause")
            assert message in await get_error(client, "/v1/update_weights")
            await run_command(client, "/v1/resume")
        after = Result(trained, PROMPT)
        assert (after.tokens, after.pool > 0) == (before.tokens, True)

    @in_event_loop
    async def test_the_old_weights_remain_if_an_update_fails_at_its_end(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = Result(trained, PROMPT)
        train(folder)

        def fail_to_collect(*_: object) -> None:
            raise OSError("the folder has gone")

        monkeypatch.setattr(model_runner, "collect_facts", fail_to_collect)
        await trained.control.pause()
        async with trained.open_client() as client:
            assert (await get_error(client, "/v1/update_weights", json={"version": "new"})).endswith(
                "the folder has gone"
            )
            assert (await client.get("/health")).status_code == 200
        await trained.control.resume()
        after = Result(trained, PROMPT)
        assert after.tokens == before.tokens
        assert after.pool > 0, "the blocks in the pool belong to the running weights"
        assert trained.control.version is None

    @in_event_loop
    async def test_requests_are_refused_after_a_partial_update_until_the_weights_are_loaded_again(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = trained.engine.runner

        def fail_during_load(_: object) -> None:
            raise RuntimeError("an illegal memory access was encountered\nCompile with ...")

        train(folder)
        async with trained.open_client() as client:
            await run_command(client, "/v1/pause")
            with monkeypatch.context() as on_cuda:  # on CUDA, the new weights overwrite the running ones
                on_cuda.setattr(runner, "device", SimpleNamespace(type="cuda"))
                on_cuda.setattr(runner.model, "load_state_dict", fail_during_load)
                message = await get_error(client, "/v1/update_weights")
            assert message.endswith(": an illegal memory access was encountered")
            assert "POST /v1/wakeup" in await get_error(client, "/v1/resume")
            for stream in (False, True):
                refused = await client.post("/v1/completions", json={**LONG, "stream": stream})
                assert refused.status_code == 503
                assert refused.json()["error"]["message"].endswith("load them again with POST /v1/wakeup")
            assert (await client.get("/health")).status_code == 503
            await run_command(client, "/v1/wakeup")
            assert (await client.get("/health")).status_code == 200
        assert Result(trained, PROMPT).tokens == answer_of(folder, PROMPT)

    @pytest.mark.parametrize("does_hang", [False, True])
    @in_event_loop
    async def test_requests_are_refused_while_kv_of_the_old_weights_may_be_used(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch, *, does_hang: bool
    ) -> None:
        Result(trained, PROMPT)
        train(folder)
        core, end = trained.engine.core, threading.Event()

        def fail_to_follow() -> None:
            end.wait(30 if does_hang else 0)
            raise RuntimeError("no pool")

        async with trained.open_client() as client:
            await run_command(client, "/v1/pause")
            with monkeypatch.context() as broken:
                broken.setattr(core, "follow_weights", fail_to_follow)
                broken.setattr(control_module, "_COMMAND_SECONDS", 0.5)
                message = await get_error(client, "/v1/update_weights")
            assert message.endswith(
                "within 0.5 s, because a step takes longer" if does_hang else "the engine failed: no pool"
            )
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/v1/completions", json=LONG)).status_code == 503
            end.set()
            await run_command(client, "/v1/wakeup")
        new = Result(trained, PROMPT)
        assert (new.tokens, new.own, new.pool) == (answer_of(folder, PROMPT), 0, 0)

    @in_event_loop
    async def test_a_command_waits_only_a_limited_time_for_another_one(
        self, trained: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has_begun, end = threading.Event(), threading.Event()

        def free_slowly() -> None:
            has_begun.set()
            end.wait(30)

        monkeypatch.setattr(trained.engine.runner, "free_weights", free_slowly)
        monkeypatch.setattr(control_module, "_COMMAND_SECONDS", 0.2)
        async with trained.open_client() as client:
            sleeping = asyncio.create_task(run_command(client, "/v1/sleep"))
            await eventually(has_begun.is_set, "the first command to begin")
            for path in ("/v1/pause", "/v1/resume"):
                assert (await get_error(client, path)).endswith(
                    "the previous command has not ended within 0.2 s; try again"
                )
            end.set()
            await sleeping

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"version": 3}, "version must be a string"),
            ({"verify_checksum": "yes"}, "verify_checksum must be a boolean"),
            ({"verify_checksum": True}, "a checkpoint folder has no checksums to verify"),
            ([], "the body must be a JSON object"),
        ],
    )
    @in_event_loop
    async def test_an_invalid_parameter_is_refused_as_in_fastdeploy(
        self, trained: Running, body: Any, message: str
    ) -> None:
        async with trained.open_client() as client:
            refused = await client.post("/v1/update_weights", json=body)
        assert (refused.status_code, refused.json()["error"]) == (400, "Invalid parameter type")
        assert message in refused.json()["message"]


async def is_without_version(running: Running) -> bool:
    return running.control.version is None


def drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


class TestFixedWeights:
    @in_event_loop
    async def test_weights_neither_sleep_nor_change_without_the_flag(
        self, tiny_checkpoint: Path, word_tokenizer: Any
    ) -> None:
        with Engine(tiny_checkpoint) as engine:
            running = Running(engine, word_tokenizer, has_dynamic_weights=False)
            async with running.open_client() as client:
                for path in ("/v1/sleep", "/v1/wakeup", "/v1/update_weights"):
                    assert (await get_error(client, path)).endswith("start the instance with --dynamic-load-weight")
                for path in ("/clear_load_weight", "/update_model_weight"):
                    refused = await client.get(path)
                    assert (refused.status_code, refused.json()) == (404, {"error": "Dynamic Load Weight Disabled."})
                await run_command(client, "/v1/sleep", params={"tags": "kv_cache"})
                await run_command(client, "/v1/wakeup", params={"tags": "kv_cache"})

    @in_event_loop
    async def test_the_older_paths_make_the_instance_sleep_and_wake_up(self, trained: Running) -> None:
        async with trained.open_client() as client:
            cleared = await client.get("/clear_load_weight")
            assert (cleared.status_code, cleared.json()["status"]) == (200, "success")
            assert trained.engine.runner.model is None
            updated = await client.get("/update_model_weight")
            assert (updated.status_code, updated.json()["status"]) == (200, "success")
            assert not await is_paused(client)


class TestProbes:
    @in_event_loop
    async def test_ping_has_the_same_status_as_health(self, running: Running) -> None:
        async with running.open_client() as client:
            for method in ("GET", "POST"):
                assert (await client.request(method, "/ping")).status_code == 200
            running.engine.core.stop()
            assert (await client.get("/ping")).status_code == (await client.get("/health")).status_code != 200

    @in_event_loop
    async def test_load_lists_the_paths_under_v1_as_in_fastdeploy(self, running: Running) -> None:
        async with running.open_client() as client:
            routes = (await client.get("/load")).json()["routes"]
        listed = {route["path"]: route["methods"] for route in routes}
        assert listed["/v1/chat/completions"] == ["POST"]
        assert listed["/v1/is_paused"] == ["GET"]
        assert all(route["path"].startswith("/v1") for route in routes)
        assert {tuple(route) for route in routes} == {("path", "methods", "tags")}
