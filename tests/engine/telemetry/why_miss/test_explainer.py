"""Broken set-ups and prompts, each named for what it is; and healthy ones, which get no false name. One table.

Set-ups and prompts are told from a pool in a folder by ``kvstore why-miss``, requests by the instance that had them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from engine.model.model_runner import load_tokenizer
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.request import Sequence as EngineSequence
from engine.telemetry.why_miss.explainer import Inquiry, MissExplainer
from engine.telemetry.why_miss.recent_requests import RecentRequests
from kvstore_backend import BlockPool, Namespace, extend_block_hashes, open_pool, root_hash
from kvstore_backend.cli import main
from kvstore_backend.config import load_config
from kvstore_backend.manifest import Manifest
from kvstore_backend.manifest_keeper import write_manifest
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.why_miss import Prompt, Verdict
from tests.engine.faulty_store import Fault, FaultyStore
from tests.engine.running import Answering, Engine
from tests.support.memory import Memory

BLOCK = 16
FACTS = {"name": "qwen", "architecture": "1", "block_hashes": "kvstore"}
PLAIN = Namespace("a" * 32, "float32", BLOCK, 2, 2, 8, "layer,kv,head,token,dim")
SETUPS = {
    "plain": (PLAIN, FACTS),
    "half": (replace(PLAIN, kv_dtype="bfloat16"), FACTS),
    "small blocks": (replace(PLAIN, block_size=8), FACTS),
    "fine-tune": (replace(PLAIN, model="b" * 32), {**FACTS, "name": "qwen-tuned"}),
    "llama": (replace(PLAIN, model="c" * 32, num_layers=4), {**FACTS, "name": "llama", "architecture": "2"}),
    "two cards": (replace(PLAIN, tp_size=2, num_kv_heads=1), FACTS),
}
STORED, OTHERS, HOLED = list(range(100)), list(range(500, 600)), list(range(1000, 1100))
SYSTEM = "you are a good friend. it is 2026-11-22 15:04:05 now. be kind, and answer with few words."
TALK = [
    ("system", SYSTEM),
    ("user", "tell me about the river"),
    ("assistant", "it runs"),
    ("user", "visit 41: and why"),
]
OK_REASONS = {"same_setup", "hit", "own_cache"}

Messages: TypeAlias = Sequence[tuple[str, str]]


class Instance:
    """An engine that remembers its requests."""

    def __init__(self, folder: Path, store: MemoryStore | FaultyStore) -> None:
        self.engine = Engine(folder, num_blocks=128, store=store, wait_for_pool=False)
        self.store = store
        self.recent = RecentRequests()
        self.tokenizer: Any = load_tokenizer(str(folder))
        self.manifest = Manifest(self.engine.runner.namespace.fields, self.engine.runner.facts)
        pool = BlockPool(store, self.engine.runner.namespace)
        self.explainer = MissExplainer(self.recent, self.tokenizer, self.manifest, pool)
        self._names = map(f"{id(self)}-{{}}".format, itertools.count())

    def encode(self, messages: Messages) -> list[int]:
        listed = [{"role": role, "content": text} for role, text in messages]
        text = self.tokenizer.apply_chat_template(listed, add_generation_prompt=True, tokenize=False)
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def answer(self, messages: Messages, salt: str = "") -> str:
        """Answer with one token; the request's id."""
        listed = tuple({"role": role, "content": text} for role, text in messages)
        tokens = tuple(self.encode(messages))
        request = Request(next(self._names), tokens, SamplingParams(1, temperature=0.0), salt, messages=listed)
        answering = Answering(EngineSequence(request, self.engine.block_size))
        self.engine.core.submit(answering.sequence, answering.listener)
        answering.wait()
        assert answering.saved.wait(30)
        self.recent.add_sequence(answering.sequence)
        return request.request_id

    def explain(self, messages: Messages, salt: str = "") -> Verdict:
        """Answer, and say why that was a miss."""
        found = self.explainer.explain_request(self.answer(messages, salt))
        assert found is not None
        return found[0]

    def forget_blocks(self) -> None:
        """Neither this instance's own cache nor the pool has any block."""
        assert self.store.clear(self.engine.runner.namespace.prefix)
        self.engine.core.clear_prefix_cache()


class World:
    """A pool in a folder with several set-ups, and instances with a pool of their own."""

    def __init__(self, folder: Path, checkpoint: Path, instances: contextlib.ExitStack) -> None:
        self._folder, self._checkpoint, self._instances = folder, checkpoint, instances
        self.url = f"file://{folder}/pool?size=16MiB"
        store = FileStore(folder / "pool", 16 << 20)
        for namespace, facts in SETUPS.values():
            assert write_manifest(store, Manifest(namespace.fields, facts))
        store.close()
        self._save(PLAIN, STORED)
        self._save(SETUPS["half"][0], OTHERS)
        self._save(PLAIN, HOLED, without=[3])

    def between(self, first: str, second: str) -> Verdict:
        return self._ask("--between", SETUPS[first][0].digest, SETUPS[second][0].digest)

    def prompt(self, tokens: Sequence[int], *arguments: str) -> Verdict:
        path = self._folder / "prompt.json"
        path.write_text(json.dumps(list(tokens)))
        return self._ask("--namespace", PLAIN.digest, "--prompt-file", str(path), *arguments)

    def instance(self, store: MemoryStore | FaultyStore | None = None) -> Instance:
        instance = Instance(self._checkpoint, store or MemoryStore(64 << 20))
        return self._instances.enter_context(contextlib.closing(_Closing(instance))).instance

    def _ask(self, *arguments: str) -> Verdict:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(["why-miss", self.url, "--json", *arguments]) == 0
        return Verdict(**json.loads(output.getvalue()))

    def _save(self, namespace: Namespace, tokens: Sequence[int], without: Sequence[int] = ()) -> None:
        config = load_config("file", explicit={"path": str(self._folder / "pool"), "size": "16MiB"}, environ={})
        hashes = extend_block_hashes([], tokens, namespace.block_size, root_hash())
        kept = [each for i, each in enumerate(hashes) if i not in without]
        memory = Memory(bytes(64))
        with open_pool(config, namespace, background=False) as pool:
            assert all(pool.save(kept, [memory.value] * len(kept)))


class _Closing:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def close(self) -> None:
        self.instance.engine.core.stop()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, few_words: Path) -> Iterator[World]:
    with contextlib.ExitStack() as instances:
        yield World(tmp_path_factory.mktemp("why"), few_words, instances)


def changed(number: int, before: str, after: str) -> Messages:
    """The talk with another text in its message ``number``, from 1 on."""
    return [(role, text.replace(before, after) if i == number else text) for i, (role, text) in enumerate(TALK, 1)]


def after_the_talk(world: World, messages: Messages, salt: str = "") -> Verdict:
    """Of a request that follows the talk at one instance."""
    instance = world.instance()
    instance.answer(TALK)
    return instance.explain(messages, salt)


def evicted_wholly(world: World) -> Verdict:
    instance = world.instance()
    instance.answer(TALK)
    instance.forget_blocks()
    return instance.explain(TALK)


def pool_away(world: World) -> Verdict:
    return world.instance(FaultyStore(MemoryStore(1 << 20), Fault.ALL_FAIL)).explain(TALK)


def evicted_while_read(world: World) -> Verdict:
    store = MemoryStore(64 << 20)
    world.instance(store).answer(TALK)
    return world.instance(FaultyStore(store, Fault.GONE_AT_LOAD)).explain(TALK)


def refused_by_the_pool(world: World) -> Verdict:
    instance = world.instance(FaultyStore(MemoryStore(64 << 20), Fault.REFUSES_SAVES))
    instance.answer(TALK)
    instance.engine.core.clear_prefix_cache()
    return instance.explain(TALK)


def not_worth_loading(world: World) -> Verdict:
    store = MemoryStore(64 << 20)
    world.instance(store).answer(TALK)
    instance = world.instance(store)
    connector = instance.engine.core._connector
    assert connector is not None
    connector._load_or_compute.decide = lambda *_: "compute"  # type: ignore[method-assign]
    return instance.explain(TALK)


def another_instances_blocks(world: World) -> Verdict:
    store = MemoryStore(64 << 20)
    world.instance(store).answer(TALK)
    return world.instance(store).explain(TALK)


Case: TypeAlias = "tuple[str, str, str, Callable[[World], Verdict]]"
BROKEN: list[Case] = [
    ("another dtype", "other_dtype", "'float32'", lambda world: world.between("plain", "half")),
    ("another block size", "other_block_size", "16 of", lambda world: world.between("plain", "small blocks")),
    ("other weights", "other_weights", "'qwen-tuned'", lambda world: world.between("plain", "fine-tune")),
    ("another model", "other_model", "'llama'", lambda world: world.between("plain", "llama")),
    ("another TP size", "other_tp_size", "tensor-parallel", lambda world: world.between("two cards", "plain")),
    ("a salt", "other_salt", "without the cache_salt", lambda world: world.prompt(STORED, "--salt", "ann")),
    ("an adapter", "other_adapter", "without the adapter", lambda world: world.prompt(STORED, "--adapter", "poet")),
    ("below one block", "below_block", "16 tokens", lambda world: world.prompt(STORED[:BLOCK])),
    ("another's blocks", "other_dtype", "for another set-up", lambda world: world.prompt(OTHERS)),
    ("a block in the middle evicted", "evicted", "lacks block 3", lambda world: world.prompt(HOLED)),
    ("a token changed", "parts", "tokens 32 to 47", lambda world: world.prompt([*STORED[:40], 7, *STORED[41:]])),
    (
        "a timestamp in message 1",
        "parts",
        "message 1, the system's: a timestamp",
        lambda world: after_the_talk(world, changed(1, "15:04:05", "16:20:00")),
    ),
    (
        "a counter in message 4",
        "parts",
        "message 4, the user's: a counter",
        lambda world: after_the_talk(world, changed(4, "41", "42")),
    ),
    (
        "white space in message 1",
        "parts",
        "message 1, the system's: white space",
        lambda world: after_the_talk(world, changed(1, "kind, and", "kind,  and")),
    ),
    ("a request's salt", "other_salt", "another cache_salt", lambda world: after_the_talk(world, TALK, "ann")),
    ("evicted wholly", "evicted", "was stored at", evicted_wholly),
    ("evicted while it was read", "damaged", "none of", evicted_while_read),
    ("refused by the pool", "unsaved", "was not stored", refused_by_the_pool),
    ("the pool away", "pool_away", "pool away", pool_away),
    ("not worth loading", "slow", "computing was expected to be quicker", not_worth_loading),
]
HEALTHY: list[Case] = [
    ("one set-up", "same_setup", "share blocks", lambda world: world.between("plain", "plain")),
    ("a prompt that is there", "hit", "all 6 blocks", lambda world: world.prompt(STORED)),
    ("another instance's blocks", "hit", "no miss", another_instances_blocks),
    ("the instance's own cache", "own_cache", "own cache had all", lambda world: after_the_talk(world, TALK)),
    (
        "a conversation that goes on",
        "hit",
        "goes on where the prompt of request",
        lambda world: after_the_talk(
            world, [*TALK, ("assistant", "the town"), ("user", "tell me more about the town")]
        ),
    ),
    ("an own prompt of somebody", "new", "it is new", lambda world: world.prompt(range(2000, 2100))),
]


@pytest.mark.parametrize(("name", "reason", "said", "situation"), BROKEN, ids=[case[0] for case in BROKEN])
def test_what_is_broken_is_named(
    world: World, name: str, reason: str, said: str, situation: Callable[[World], Verdict]
) -> None:
    verdict = situation(world)
    assert (verdict.reason, said in verdict.sentence) == (reason, True), verdict.sentence
    assert "2026" not in verdict.sentence, "another's prompt is told"


@pytest.mark.parametrize(("name", "reason", "said", "situation"), HEALTHY, ids=[case[0] for case in HEALTHY])
def test_what_is_healthy_gets_no_false_name(
    world: World, name: str, reason: str, said: str, situation: Callable[[World], Verdict]
) -> None:
    verdict = situation(world)
    assert (verdict.reason, said in verdict.sentence) == (reason, True), verdict.sentence
    assert verdict.reason in OK_REASONS | {"new"}


def test_there_are_fifteen_broken_ones_and_five_healthy_ones() -> None:
    assert (len(BROKEN) >= 15, len(HEALTHY) >= 5) == (True, True)


class TestAnotherInstance:
    """What an instance says of a request that another one had."""

    def test_it_tells_the_place_where_its_own_request_parts(self, world: World) -> None:
        store = MemoryStore(64 << 20)
        knowing, asked = world.instance(store), world.instance(store)
        knowing.answer(TALK)
        found = asked.explainer.explain_request(asked.answer(changed(4, "41", "42")))
        assert found is not None
        verdict, inquiry = found
        assert (verdict.reason, "token" in verdict.details) == ("parts", False)
        assert "no request that this instance remembers has block" in verdict.sentence
        assert "a counter" in knowing.explainer.find_kin(inquiry).sentence

    def test_it_tells_what_it_had_stored_and_the_other_did_not_find(self, world: World) -> None:
        knowing, asked = world.instance(), world.instance()
        knowing.answer(TALK)
        found = asked.explainer.explain_request(asked.answer(TALK))
        assert found is not None
        verdict = knowing.explainer.find_kin(replace(found[1], manifest=asked.manifest))
        assert (verdict.reason, "in different pools" in verdict.sentence) == ("evicted", True)

    def test_it_tells_of_another_set_up(self, world: World) -> None:
        knowing = world.instance()
        knowing.answer(TALK)
        fields = {**knowing.manifest.fields, "kv_dtype": "bfloat16"}
        inquiry = Inquiry(knowing.encode(TALK), "", 0, time.monotonic(), manifest=Manifest(fields))
        verdict = knowing.explainer.find_kin(inquiry)
        assert (verdict.reason, "at an instance with another set-up" in verdict.sentence) == ("other_dtype", True)
        found_all = replace(inquiry, leading=len(inquiry.token_ids) // BLOCK)
        assert knowing.explainer.find_kin(found_all).reason == "parts", "the set-up cost nothing"


def test_a_prompt_is_explained_before_it_is_asked(world: World) -> None:
    instance = world.instance()
    instance.answer(TALK)
    ready = Prompt(instance.encode(TALK), messages=TALK)
    assert instance.explainer.explain_prompt(ready, None).reason == "hit"
    late = changed(1, "15:04:05", "16:20:00")
    verdict = instance.explainer.explain_prompt(Prompt(instance.encode(late), messages=late), None)
    assert "message 1, the system's: a timestamp" in verdict.sentence
    verdict = instance.explainer.explain_prompt(Prompt(instance.encode(late), messages=late), ready)
    assert "'2026-11-22 15:04:05' became '2026-11-22 16:20:00'" in verdict.sentence


def test_a_request_that_nobody_remembers_is_not_explained(world: World) -> None:
    assert world.instance().explainer.explain_request("unheard of") is None
