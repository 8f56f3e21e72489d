"""Orders to a running instance: what requests, its own cache and its router get of them; FastDeploy's answers."""

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
    """An engine, the orders to it, and its HTTP paths."""

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
            answers = await asyncio.gather(*asked)
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 6

    @in_event_loop
    async def test_an_answer_that_begins_as_the_instance_is_paused_ends_with_abort(self, running: Running) -> None:
        late = Request("late", (1, 2, 3), SamplingParams(5, temperature=0.0))
        begun = running.generations.begin_choices([(late, None)], 1)
        await running.control.pause()
        assert [piece.finish_reason async for _, piece in begun.pieces()] == ["abort"]
        assert not running.engine.scheduler.has_sequences

    @in_event_loop
    async def test_a_client_that_does_not_read_its_stream_holds_no_pause_up(self, running: Running) -> None:
        request = Request("slow", (1, 2, 3), SamplingParams(190, temperature=0.0, ignore_eos=True))
        pieces = running.generations.begin_choices([(request, None)], 1).pieces()
        await anext(pieces)
        await running.control.pause()
        assert running.generations.num_live == 1
        assert [piece.finish_reason async for _, piece in pieces][-1] == "abort"

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
        monkeypatch.setattr(control_module, "_COMMAND_SECONDS", 0.05)
        monkeypatch.setattr(type(running.engine.scheduler), "has_sequences", True)
        async with running.asking() as client:
            failed = await client.post("/v1/pause")
            assert (failed.status_code, failed.json()["status"], failed.json()["result"]) == (500, "error", None)
            message = failed.json()["error_message"]
            assert message.startswith(f"Failed to run control method pause: {failed.json()['request_id']} ")
            assert message.endswith("running requests have not ended within 0.05 s; try again")
            assert await is_paused(client)

    @in_event_loop
    async def test_an_engine_that_has_ended_cannot_be_paused(self, running: Running) -> None:
        running.engine.core.stop()
        async with running.asking() as client:
            failed = await client.post("/v1/pause")
        assert failed.json()["error_message"].endswith(
            "the engine of this instance has ended; the instance's log says why"
        )


@pytest.fixture
def folder(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, in which a trainer may write."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


@pytest.fixture
def trained(folder: Path, word_tokenizer: Any) -> Iterator[Running]:
    """An instance of that copy, with a pool."""
    with Engine(folder, store=MemoryStore(64 << 20), has_dynamic_weights=True) as engine:
        yield Running(engine, word_tokenizer)


def train(folder: Path, factor: float = 1.5) -> None:
    """Write other weights into the folder."""
    path = folder / "model.safetensors"
    tensors = {name: tensor * factor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def answer_of(folder: Path, prompt: list[int]) -> list[int]:
    """What an instance answers that is started with the weights of now."""
    with Engine(folder) as engine:
        return engine.answer(prompt, 8).wait()


class Asked:
    """The tokens of an answer, and where its prompt's KV came from."""

    def __init__(self, running: Running, prompt: list[int]) -> None:
        answering = running.engine.answer(prompt, 8)
        self.tokens = answering.wait()
        self.own, self.pool = answering.sequence.own_cached_tokens, answering.sequence.pool_cached_tokens


PROMPT = [7, 8, 9, 10] * 12


async def fail(client: httpx.AsyncClient, path: str, **more: Any) -> str:
    """The sentence of an order that cannot be carried out."""
    answer = await client.post(path, **more)
    told = answer.json()
    assert (answer.status_code, told["status"], told["result"]) == (500, "error", None), told
    return str(told["error_message"])


class TestSleep:
    @pytest.mark.parametrize(
        "said",
        [
            {},
            {"params": {"tags": "weight,kv_cache"}},
            {"json": {"tags": ["weight", "kv_cache"]}},
            {"json": {"tags": "kv_cache"}},
            {"params": {"tags": "weight"}},
        ],
    )
    @in_event_loop
    async def test_who_wakes_up_answers_as_before_and_the_own_cache_is_gone(
        self, trained: Running, said: dict[str, Any]
    ) -> None:
        before = Asked(trained, PROMPT)
        async with trained.asking() as client:
            assert await order(client, "/v1/sleep", **said) == [None]
            assert await is_paused(client)
            assert await order(client, "/v1/wakeup", **said) == [None]
            assert not await is_paused(client)
        after = Asked(trained, PROMPT)
        assert (after.tokens, after.own) == (before.tokens, 0)
        assert after.pool > 0, "the weights are the same, so the pool's blocks are of use"

    @in_event_loop
    async def test_memory_is_given_back(self, trained: Running) -> None:
        Asked(trained, PROMPT)
        runner = trained.engine.runner
        weight = weakref.ref(next(runner.model.parameters()))
        assert runner.kv.any()
        await trained.control.sleep(["weight", "kv_cache"])
        assert weight() is None
        assert not runner.kv.any(), "pages that were given back are read as zeros"

    @in_event_loop
    async def test_it_takes_requests_only_when_nothing_sleeps_any_more(self, trained: Running) -> None:
        async with trained.asking() as client:
            await order(client, "/v1/sleep")
            await order(client, "/v1/wakeup", params={"tags": "kv_cache"})
            assert await is_paused(client)
            message = await fail(client, "/v1/resume")
            assert message.endswith("this instance sleeps and has freed weight; POST /v1/wakeup first")
            assert "POST /v1/wakeup" in await fail(client, "/v1/update_weights")
            await order(client, "/v1/wakeup", params={"tags": "weight"})
            assert not await is_paused(client)

    @in_event_loop
    async def test_who_wakes_up_has_the_weights_that_were_trained_meanwhile(
        self, trained: Running, folder: Path
    ) -> None:
        before = Asked(trained, PROMPT)
        await trained.control.sleep(["weight"])
        train(folder)
        await trained.control.wake_up(["weight"])
        after = Asked(trained, PROMPT)
        assert after.tokens == answer_of(folder, PROMPT) != before.tokens
        assert (after.own, after.pool) == (0, 0)

    @in_event_loop
    async def test_blocks_on_their_way_are_waited_for_and_then_told(
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
    async def test_who_could_give_back_a_part_only_is_not_resumed_without_it(
        self, trained: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = Asked(trained, PROMPT)

        def fail_to_free() -> None:
            raise OSError("madvise failed")

        async with trained.asking() as client:
            with monkeypatch.context() as broken:
                broken.setattr(trained.engine.runner, "free_kv", fail_to_free)
                assert (await fail(client, "/v1/sleep")).endswith("madvise failed")
            assert "POST /v1/wakeup first" in await fail(client, "/v1/resume")
            await order(client, "/v1/wakeup")
        assert Asked(trained, PROMPT).tokens == before.tokens

    @pytest.mark.parametrize("path", ["/v1/sleep", "/v1/wakeup"])
    @in_event_loop
    async def test_a_part_that_cannot_sleep_is_refused_in_fastdeploys_words(self, trained: Running, path: str) -> None:
        async with trained.asking() as client:
            message = await fail(client, path, params={"tags": "weight,cache"})
            assert message.endswith("Unsupported tag [cache] in [weight,cache], expected one of ['weight', 'kv_cache']")
            refused = await client.post(path, json={"tags": 3})
            assert (refused.status_code, refused.json()["error"]) == (400, "Invalid parameter type")
            assert not await is_paused(client)


class TestUpdateWeights:
    @in_event_loop
    async def test_answers_are_those_of_the_new_weights_and_no_kv_of_the_old_ones_is_read(
        self, trained: Running, folder: Path
    ) -> None:
        old = Asked(trained, PROMPT)
        assert Asked(trained, PROMPT).own > 0
        train(folder)
        async with trained.asking() as client:
            await order(client, "/v1/pause")
            (told,) = await order(client, "/v1/update_weights", json={"version": "global_step_2"})
            assert await is_paused(client), "as FastDeploy, it is resumed by an order of its own"
            await order(client, "/v1/resume")
        assert (told["version"], told["rank"]) == ("global_step_2", 0)
        assert trained.control.version == "global_step_2"
        new = Asked(trained, PROMPT)
        assert (new.own, new.pool) == (0, 0)
        assert new.tokens == answer_of(folder, PROMPT) != old.tokens
        trained.engine.core.clear_prefix_cache()
        again = Asked(trained, PROMPT)
        assert (again.tokens, again.pool > 0) == (new.tokens, True), "blocks of the new weights are shared as ever"

    @in_event_loop
    async def test_weights_that_only_their_bytes_tell_apart_share_nothing(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fingerprint = trained.engine.runner.namespace.model
        monkeypatch.setattr(model_runner, "fingerprint_model", lambda _: fingerprint)
        Asked(trained, PROMPT)
        seen = {trained.engine.runner.namespace}
        await trained.control.pause()
        for _ in range(2):
            train(folder)
            await trained.control.update_weights("")
            seen.add(trained.engine.runner.namespace)
        await trained.control.resume()
        assert len(seen) == 3
        new = Asked(trained, PROMPT)
        assert (new.tokens, new.own, new.pool) == (answer_of(folder, PROMPT), 0, 0)

    def test_an_instance_that_is_started_later_shares_nothing_of_weights_that_only_their_bytes_tell_apart(
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
        before = Asked(trained, PROMPT)
        await trained.control.pause()
        await trained.control.update_weights("")
        await trained.control.resume()
        after = Asked(trained, PROMPT)
        assert (after.tokens, after.own, after.pool > 0) == (before.tokens, 0, True)

    @in_event_loop
    async def test_the_version_is_the_folders_unless_the_order_names_one(self, trained: Running, folder: Path) -> None:
        assert await is_without_version(trained)
        (folder / "version.yaml").write_text("version: RL-STEP2-20261123-abc\n")
        await trained.control.pause()
        (told,) = await trained.control.update_weights("")
        assert told["version"] == trained.control.version == "RL-STEP2-20261123-abc"
        assert trained.engine.runner.namespace.weights_version.startswith("RL-STEP2-20261123-abc+")
        with Engine(folder, has_dynamic_weights=True) as started:
            assert started.runner.namespace == trained.engine.runner.namespace

    @in_event_loop
    async def test_what_a_trainer_writes_is_not_used_before_the_update(self, trained: Running, folder: Path) -> None:
        before = Asked(trained, PROMPT)
        (folder / "model.safetensors").write_bytes(b"half a file")  # in place, where it may be mapped into memory
        trained.engine.core.clear_prefix_cache()
        trained.engine.core.scheduler.pool = False
        after = Asked(trained, PROMPT)
        assert (after.tokens, after.own, after.pool) == (before.tokens, 0, 0)

    @in_event_loop
    async def test_the_instance_must_be_paused(self, trained: Running) -> None:
        async with trained.asking() as client:
            message = await fail(client, "/v1/update_weights", json={})
        assert message.endswith("Pause LLM Engine first before calling updating weights")

    @pytest.mark.parametrize(
        ("spoil", "message"),
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
    async def test_weights_that_cannot_be_used_leave_the_old_ones_in_place(
        self, trained: Running, folder: Path, spoil: Callable[[Path], object], message: str
    ) -> None:
        before = Asked(trained, PROMPT)
        spoil(folder)
        async with trained.asking() as client:
            await order(client, "/v1/pause")
            assert message in await fail(client, "/v1/update_weights")
            await order(client, "/v1/resume")
        after = Asked(trained, PROMPT)
        assert (after.tokens, after.pool > 0) == (before.tokens, True)

    @in_event_loop
    async def test_an_update_that_fails_at_its_end_leaves_the_old_weights_in_place(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = Asked(trained, PROMPT)
        train(folder)

        def fail_to_collect(*_: object) -> None:
            raise OSError("the folder has gone")

        monkeypatch.setattr(model_runner, "collect_facts", fail_to_collect)
        await trained.control.pause()
        async with trained.asking() as client:
            assert (await fail(client, "/v1/update_weights", json={"version": "new"})).endswith("the folder has gone")
            assert (await client.get("/health")).status_code == 200
        await trained.control.resume()
        after = Asked(trained, PROMPT)
        assert after.tokens == before.tokens
        assert after.pool > 0, "the pool's blocks are of the weights that run"
        assert trained.control.version is None

    @in_event_loop
    async def test_weights_that_fail_halfway_let_nothing_be_answered_until_they_are_loaded_again(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = trained.engine.runner

        def fail_halfway(_: object) -> None:
            raise RuntimeError("an illegal memory access was encountered\nCompile with ...")

        train(folder)
        async with trained.asking() as client:
            await order(client, "/v1/pause")
            with monkeypatch.context() as on_cuda:  # where the weights are copied over those that run
                on_cuda.setattr(runner, "device", SimpleNamespace(type="cuda"))
                on_cuda.setattr(runner.model, "load_state_dict", fail_halfway)
                message = await fail(client, "/v1/update_weights")
            assert message.endswith(": an illegal memory access was encountered")
            assert "POST /v1/wakeup" in await fail(client, "/v1/resume")
            for stream in (False, True):
                refused = await client.post("/v1/completions", json={**LONG, "stream": stream})
                assert refused.status_code == 503
                assert refused.json()["error"]["message"].endswith("load them again with POST /v1/wakeup")
            assert (await client.get("/health")).status_code == 503
            await order(client, "/v1/wakeup")
            assert (await client.get("/health")).status_code == 200
        assert Asked(trained, PROMPT).tokens == answer_of(folder, PROMPT)

    @pytest.mark.parametrize("does_hang", [False, True])
    @in_event_loop
    async def test_new_weights_answer_nothing_while_kv_of_the_old_ones_is_in_use(
        self, trained: Running, folder: Path, monkeypatch: pytest.MonkeyPatch, *, does_hang: bool
    ) -> None:
        Asked(trained, PROMPT)
        train(folder)
        core, end = trained.engine.core, threading.Event()

        def follow_badly() -> None:
            end.wait(30 if does_hang else 0)
            raise RuntimeError("no pool")

        async with trained.asking() as client:
            await order(client, "/v1/pause")
            with monkeypatch.context() as broken:
                broken.setattr(core, "follow_weights", follow_badly)
                broken.setattr(control_module, "_COMMAND_SECONDS", 0.5)
                message = await fail(client, "/v1/update_weights")
            assert message.endswith(
                "within 0.5 s, because a step takes longer" if does_hang else "the engine failed: no pool"
            )
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/v1/completions", json=LONG)).status_code == 503
            end.set()
            await order(client, "/v1/wakeup")
        new = Asked(trained, PROMPT)
        assert (new.tokens, new.own, new.pool) == (answer_of(folder, PROMPT), 0, 0)

    @in_event_loop
    async def test_an_order_waits_for_another_one_for_a_bounded_time(
        self, trained: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, end = threading.Event(), threading.Event()

        def free_slowly() -> None:
            begun.set()
            end.wait(30)

        monkeypatch.setattr(trained.engine.runner, "free_weights", free_slowly)
        monkeypatch.setattr(control_module, "_COMMAND_SECONDS", 0.2)
        async with trained.asking() as client:
            sleeping = asyncio.create_task(order(client, "/v1/sleep"))
            await eventually(begun.is_set, "the first order to begin")
            for path in ("/v1/pause", "/v1/resume"):
                assert (await fail(client, path)).endswith("the previous command has not ended within 0.2 s; try again")
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
    async def test_a_parameter_that_cannot_be_used_is_refused_as_fastdeploy_does(
        self, trained: Running, body: Any, message: str
    ) -> None:
        async with trained.asking() as client:
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
    async def test_without_the_flag_weights_neither_sleep_nor_change(
        self, tiny_checkpoint: Path, word_tokenizer: Any
    ) -> None:
        with Engine(tiny_checkpoint) as engine:
            running = Running(engine, word_tokenizer, has_dynamic_weights=False)
            async with running.asking() as client:
                for path in ("/v1/sleep", "/v1/wakeup", "/v1/update_weights"):
                    assert (await fail(client, path)).endswith("start the instance with --dynamic-load-weight")
                for path in ("/clear_load_weight", "/update_model_weight"):
                    refused = await client.get(path)
                    assert (refused.status_code, refused.json()) == (404, {"error": "Dynamic Load Weight Disabled."})
                await order(client, "/v1/sleep", params={"tags": "kv_cache"})
                await order(client, "/v1/wakeup", params={"tags": "kv_cache"})

    @in_event_loop
    async def test_the_older_paths_sleep_and_wake_up(self, trained: Running) -> None:
        async with trained.asking() as client:
            cleared = await client.get("/clear_load_weight")
            assert (cleared.status_code, cleared.json()["status"]) == (200, "success")
            assert trained.engine.runner.model is None
            updated = await client.get("/update_model_weight")
            assert (updated.status_code, updated.json()["status"]) == (200, "success")
            assert not await is_paused(client)


class TestProbes:
    @in_event_loop
    async def test_ping_answers_as_health_does(self, running: Running) -> None:
        async with running.asking() as client:
            for method in ("GET", "POST"):
                assert (await client.request(method, "/ping")).status_code == 200
            running.engine.core.stop()
            assert (await client.get("/ping")).status_code == (await client.get("/health")).status_code != 200

    @in_event_loop
    async def test_load_lists_the_paths_under_v1_as_fastdeploy_does(self, running: Running) -> None:
        async with running.asking() as client:
            routes = (await client.get("/load")).json()["routes"]
        listed = {route["path"]: route["methods"] for route in routes}
        assert listed["/v1/chat/completions"] == ["POST"]
        assert listed["/v1/is_paused"] == ["GET"]
        assert all(route["path"].startswith("/v1") for route in routes)
        assert {tuple(route) for route in routes} == {("path", "methods", "tags")}
