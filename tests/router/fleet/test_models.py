"""A router with several models: each request goes only to instances that serve its model."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections import Counter
from typing import Any, NamedTuple

import openai
import pytest

from router.fleet import health
from router.fleet.models import UNLISTED, ListTooLong, ServedModels, parse_models, read_names
from router.fleet.registration import MAX_MODELS
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import Received, Responder, StandIn, answers, streams
from tests.support.waiting import wait_until

FREQUENT_PROBES = {"health_check_interval_secs": 0.05}


class ModelsOnly(NamedTuple):
    """An instance with only its models."""

    models: frozenset[str] | None


def served(*models: str | None, gone: tuple[str, ...] = ()) -> ServedModels:
    """Return the models of instances. ``""``: the instance reports none; None: the router has not asked yet."""
    instances = [ModelsOnly(None if each is None else frozenset(each.split())) for each in models]
    return ServedModels(instances, gone)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("models", "name", "expected"),
    [
        (served("a", "b"), "a", "a"),
        (served("a", "b"), "c", None),
        (served("a", "b"), "", ""),
        (served("a", "b"), "any", ""),
        (served("a", "b"), "default", ""),
        (served("a", "default"), "default", "default"),
        (served("a", "b"), ["a"], ""),
        (served("a", "b"), None, ""),
        (served("a lora"), "lora", "lora"),
        (served("a lora"), "loar", None),
        (served("a", "b", ""), "c", UNLISTED),
        (served("a", "b", None), "c", None),
        (served("a"), "whatever", ""),
        (served(), "whatever", ""),
        (served("a", gone=("b",)), "b", None),
        (served("a", gone=("b",)), "whatever", ""),
        (served("a", "", gone=("b",)), "b", UNLISTED),
        (served("a", "b", gone=("b",)), "b", "b"),
        (served(gone=("b",)), "b", ""),
    ],
)
def test_a_name_selects_a_model_if_there_are_several(models: ServedModels, name: object, expected: str | None) -> None:
    assert models.find(name) == expected


@pytest.mark.parametrize(
    ("models", "are_several"),
    [
        (served(), False),
        (served("a", "a", "", None), False),
        (served("a", "b"), True),
        (served("a b"), True),
        (served("a", gone=("b",)), True),
        (served("a", gone=("a",)), False),
    ],
)
def test_names_matter_only_if_there_are_or_were_several_models(models: ServedModels, are_several: bool) -> None:
    assert models.are_several is are_several


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"data": 5}', b"null", b"<html>"])
def test_a_response_that_is_not_a_list_of_models_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="the response is not a list of models: "):
        parse_models(data)


def test_only_the_first_models_of_a_list_that_is_too_long_are_read() -> None:
    listed = [{"id": str(number)} for number in range(MAX_MODELS + 1)]
    assert parse_models(json.dumps({"data": listed}).encode()) == listed[:-1]


def test_a_list_with_too_many_bytes_is_not_read() -> None:
    with pytest.raises(ListTooLong, match="list"):
        parse_models(json.dumps({"data": [{"id": "x" * 5_000_000}]}).encode())


def test_names_that_could_forge_log_lines_are_ignored() -> None:
    assert read_names([{"id": "a/b c"}, {"id": "x\n2026 ERROR"}, {"id": "\x1b[31m"}, {"id": ""}, {}]) == {"a/b c"}


def list_models(router: RouterUnderTest) -> list[list[str] | None]:
    listed: list[dict[str, Any]] = router.client.get("/registered").json()["mixed"]
    return [each["models"] for each in listed]


def start_mixed(stand_in: MakeStandIn, *models: tuple[str, ...] | None) -> list[StandIn]:
    instances = [stand_in() for _ in models]
    for instance, each in zip(instances, models, strict=True):
        instance.models, instance.models_status = each or (), 404 if each is None else 200
    return instances


def count_models(instance: StandIn) -> Counter[str]:
    """Count the requests for each model that the instance received."""
    return Counter(str(request.json.get("model")) for request in instance.received)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("splitwise", [False, True])
def test_under_load_no_request_reaches_an_instance_of_another_model(
    make_router: MakeRouter, stand_in: MakeStandIn, splitwise: bool, workers: int
) -> None:
    """Each model has two instances or pairs, of which one stops and starts."""
    roles = ("prefill", "decode") if splitwise else ("mixed",)
    instances = {model: [stand_in(role) for role in roles * 2] for model in ("a", "b")}
    for model, of_model in instances.items():
        for instance in of_model:
            instance.models = (model,)
    router = make_router(*instances["a"], *instances["b"], splitwise=splitwise, workers=workers)
    stopped = threading.Semaphore(0)

    def ask(number: int) -> int:
        model, worker = "ab"[number % 2], router.workers[number // 2 % workers]
        if number in (50, 150):
            instances[model][-1].stop()
            stopped.release()
        if number in (100, 200):
            assert stopped.acquire(timeout=30), "another thread stops the instance first"
            instances[model][-1].start()
        if number % 3:
            return worker.chat(model=model).status_code
        with worker.stream(model=model) as response:
            response.read()
            return int(response.status_code)

    for of_model in instances.values():
        for instance in of_model:
            instance.behave = answer_either_way
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert Counter(pool.map(ask, range(240))) == {200: 240}
    for model, of_model in instances.items():
        for instance in of_model:
            assert set(count_models(instance)) <= {model}
    assert sum(len(each.answered) > 0 for of_model in instances.values() for each in of_model) >= 2 * len(roles)


async def answer_either_way(request: Received, respond: Responder) -> None:
    behave = streams("1", "2") if request.json.get("stream") else answers()
    await behave(request, respond)


def test_the_error_for_a_misspelt_model_has_the_nearest_name(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instances = start_mixed(stand_in, ("qwen3-8b",), ("ernie-4.5",))
    router = make_router(*instances)
    response = router.chat(model="qwen38b")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "no instance serves a model 'qwen38b'; did you mean qwen3-8b?",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert "served are: ernie-4.5, qwen3-8b" in router.chat(model="x").json()["error"]["message"]
    assert router.chat(model="c" * 100_000).status_code == 404
    assert [each.received for each in instances] == [[], []]


def test_with_a_single_model_any_name_is_accepted_and_forwarded_unchanged(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    first, second = start_mixed(stand_in, ("m",), ("m",))
    router = make_router(first, second)
    for name in ("m", "misspelt", "default", "any", ""):
        assert router.chat(model=name).status_code == 200
    assert router.chat().status_code == 200
    got = count_models(first) + count_models(second)
    assert got == {"m": 1, "misspelt": 1, "default": 1, "any": 1, "": 1, "None": 1}


@pytest.mark.parametrize("name", ["any", "default", "", None])
def test_a_request_without_a_model_can_go_to_any_instance(
    make_router: MakeRouter, stand_in: MakeStandIn, name: str | None
) -> None:
    instances = start_mixed(stand_in, ("a",), ("b",))
    router = make_router(*instances)
    assert [router.chat(model=name).status_code for _ in range(4)] == [200] * 4
    assert sum(len(each.received) for each in instances) == 4


def test_the_pair_for_a_request_without_a_model_serves_one_model(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    pairs = {model: (stand_in("prefill"), stand_in("decode")) for model in ("a", "b")}
    for model, pair in pairs.items():
        for instance in pair:
            instance.models = (model,)
    router = make_router(*pairs["a"], *pairs["b"], splitwise=True)
    assert [router.chat().status_code for _ in range(8)] == [200] * 8
    for prefill, decode in pairs.values():
        assert len(prefill.received) == len(decode.received)


def test_prefill_and_decode_of_different_models_are_no_pair(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    prefill.models, decode.models = ("a",), ("b",)
    router = make_router(prefill, decode, splitwise=True)
    response = router.chat()
    message = (
        "prefill and decode must serve the same model under the same name; registered are prefill 'a' and decode 'b'"
    )
    assert (response.status_code, response.json()["error"]["message"]) == (503, message)
    response = router.chat(model="a")
    assert response.status_code == 503
    assert "no decode instance that serves 'a' is registered" in response.json()["error"]["message"]


def test_an_instance_without_a_list_of_models_serves_any_model(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    first, second, old = start_mixed(stand_in, ("a",), ("b",), None)
    router = make_router(first, second, old)
    assert router.chat(model="c").status_code == 200
    assert count_models(old) == {"c": 1}
    assert list_models(router) == [["a"], ["b"], []]


@pytest.mark.parametrize(
    ("models", "served", "unserved"),
    [
        (tuple(f"m{number}" for number in range(MAX_MODELS + 1)), "m0", f"m{MAX_MODELS}"),
        (("b", "x" * 5_000_000), "a", "b"),
    ],
    ids=["too many models", "too many bytes"],
)
def test_an_instance_with_a_list_that_is_too_long_serves_only_the_models_that_were_read(
    make_router: MakeRouter,
    stand_in: MakeStandIn,
    caplog: pytest.LogCaptureFixture,
    models: tuple[str, ...],
    served: str,
    unserved: str,
) -> None:
    first, second, long = start_mixed(stand_in, ("a",), ("c",), models)
    router = make_router(first, second, long, **FREQUENT_PROBES)
    assert router.chat(model=served).status_code == 200
    asked = long.models_asked
    assert router.chat(model=unserved).status_code == 404
    wait_until(lambda: long.models_asked > asked, "another request for the list")
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len([each for each in warnings if each.startswith(f"instance {long.key}: ")]) == 1


def test_an_instance_that_does_not_send_its_models_gets_no_request_for_a_model(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ASK_SECONDS", 0.2)
    first, second, busy = start_mixed(stand_in, ("a",), ("b",), ("a",))
    hang = [True]
    respond = busy._respond

    async def hang_for_models(request: Received, responder: Responder) -> None:
        if request.target == "/v1/models" and hang[0]:
            await responder.peer_left.wait()
            responder.keep_alive = False
        else:
            await respond(request, responder)

    busy._respond = hang_for_models  # type: ignore[method-assign]
    router = make_router(first, second, busy, **FREQUENT_PROBES)
    assert [router.chat(model="a").status_code for _ in range(4)] == [200] * 4
    assert (len(first.received), len(busy.received)) == (4, 0)
    hang[0] = False
    wait_until(lambda: list_models(router)[2] == ["a"], "the list of its models")
    assert [router.chat(model="a").status_code for _ in range(4)] == [200] * 4
    assert busy.received


def test_a_newly_loaded_adapter_is_found_after_a_request_for_it(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    with_adapter, without = start_mixed(stand_in, ("m",), ("m", "other"))
    router = make_router(with_adapter, without, **FREQUENT_PROBES)
    assert router.chat(model="lora").status_code == 404
    with_adapter.models = ("m", "lora")
    wait_until(lambda: router.chat(model="lora").status_code == 200, "the adapter")
    assert [router.chat(model="lora").status_code for _ in range(4)] == [200] * 4
    assert (set(count_models(with_adapter)), set(count_models(without))) == ({"lora"}, set())


def test_models_are_requested_again_after_an_interval(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    (instance,) = start_mixed(stand_in, ("m",))
    router = make_router(instance, **FREQUENT_PROBES)
    asked, probes = instance.models_asked, instance.probes
    wait_until(lambda: instance.probes > probes + 2, "some probes")
    assert instance.models_asked == asked == 1
    monkeypatch.setattr(health, "MODELS_SECONDS", 0.0)
    instance.models = ("m", "lora")
    wait_until(lambda: list_models(router) == [["lora", "m"]], "the adapter")


def test_an_instance_that_returns_is_asked_for_its_models_first(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    first, second = start_mixed(stand_in, ("a",), ("b",))
    router = make_router(first, second, **FREQUENT_PROBES)
    second.stop()
    assert router.chat(model="b").status_code == 502
    second.models = ("c",)
    second.start()
    wait_until(lambda: router.chat(model="c").status_code == 200, "the other model")
    assert router.chat(model="b").status_code == 404


def test_a_request_for_a_model_of_removed_instances_goes_to_no_other(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    first, second = start_mixed(stand_in, ("a",), ("b",))
    router = make_router(first, **FREQUENT_PROBES, heartbeat_expiry_secs=1.0)
    second.register(router.url)
    second.stop()
    for instance in router.app.registry:
        instance.permanent = instance.key == first.key
    wait_until(lambda: len(list_models(router)) == 1, "its removal")
    error = router.chat(model="b").json()["error"]
    assert (error["message"], error["code"]) == (
        "no instance serves the model 'b' any more; the instances that served it are gone",
        "no_instance",
    )
    assert router.chat(model="misspelt").status_code == 200
    assert set(count_models(first)) == {"misspelt"}
    second.start()
    second.register(router.url)
    assert router.chat(model="b").status_code == 200


def test_a_registration_can_name_the_models(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    (silent, other) = start_mixed(stand_in, None, ("b",))
    router = make_router(other)
    silent.register(router.url, models=["a"])
    assert [router.chat(model="a").status_code for _ in range(2)] == [200] * 2
    assert (len(silent.received), len(other.received)) == (2, 0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions"])
def test_other_requests_go_to_their_model_too(make_router: MakeRouter, stand_in: MakeStandIn, path: str) -> None:
    first, second = start_mixed(stand_in, ("a",), ("b",))
    router = make_router(first, second)
    for _ in range(3):
        if path == "/v1/embeddings":
            sent = router.client.post(path, json={"input": "x" * 100_000, "model": "b"})
        else:
            sent = router.client.post(path, data={"model": "b"}, files={"file": ("a.wav", b"\0" * 100_000)})
        assert sent.status_code == 200
    assert (len(first.received), len(second.received)) == (0, 3)


class TestAliases:
    """``--model-alias NAME=MODEL``."""

    def test_the_instance_gets_the_name_of_the_model(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        first, second = start_mixed(stand_in, ("Qwen/Qwen3-8B",), ("b",))
        router = make_router(first, second, model_alias=("chat=Qwen/Qwen3-8B",))
        assert router.chat(model="chat", seed=1).status_code == 200
        assert (first.received[0].json["model"], first.received[0].json["seed"]) == ("Qwen/Qwen3-8B", 1)
        assert second.received == []

    def test_other_requests_can_use_an_alias(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        first, second = start_mixed(stand_in, ("bge",), ("whisper",))
        router = make_router(first, second, model_alias=("embed=bge", "speech=whisper"))
        sent = {"model": "embed", "input": "x"}
        assert router.client.post("/v1/embeddings", json=sent).status_code == 200
        assert first.received[0].json == {"model": "bge", "input": "x"}
        form = {"data": {"model": "speech"}, "files": {"file": ("a.wav", bytes(100))}}
        assert router.client.post("/v1/audio/transcriptions", **form).status_code == 200  # type: ignore[arg-type]
        assert b'name="model"\r\n\r\nwhisper\r\n' in second.received[0].body

    def test_an_alias_of_a_single_model_is_replaced(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        (instance,) = start_mixed(stand_in, ("m",))
        router = make_router(instance, model_alias=("chat=m",))
        assert [router.chat(model=name).status_code for name in ("chat", "other")] == [200, 200]
        assert count_models(instance) == {"m": 1, "other": 1}

    def test_a_prompt_has_one_prefix_under_both_names(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        (instance,) = start_mixed(stand_in, ("m",))
        router = make_router(instance, model_alias=("chat=m",))
        messages = [{"role": "user", "content": "again and again " * 200}]
        cached = [router.chat(model=name, messages=messages).headers["x-router-decision"] for name in ("m", "chat")]
        assert cached[0] == "pool_aware; cached=0"
        assert cached[1] != "pool_aware; cached=0"

    def test_a_misspelt_alias_is_reported(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router = make_router(*start_mixed(stand_in, ("a",), ("b",)), model_alias=("assistant=a",))
        assert "did you mean assistant?" in router.chat(model="asistant").json()["error"]["message"]

    def test_an_alias_is_listed_with_its_model(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        router = make_router(*start_mixed(stand_in, ("a",)), model_alias=("chat=a", "nothing=b"))
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["a", "chat"]
            assert client.models.retrieve("chat").id == "chat"


def test_openais_client_lists_all_models_and_gets_an_error_for_a_misspelt_one(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(*start_mixed(stand_in, ("a", "lora"), ("b",)))
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["a", "lora", "b"]
        with pytest.raises(openai.NotFoundError, match="did you mean lora") as refused:
            client.chat.completions.create(model="loora", messages=[{"role": "user", "content": "hi"}])
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_equal_prompts_of_two_models_share_no_prefix(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(*start_mixed(stand_in, ("a",), ("b",)))
    messages = [{"role": "user", "content": "again and again " * 200}]
    decisions = [router.chat(model=name, messages=messages).headers["x-router-decision"] for name in ("a", "b", "a")]
    assert decisions[:2] == ["pool_aware; cached=0"] * 2
    assert decisions[2] != "pool_aware; cached=0"


def test_each_model_has_its_own_turn_of_round_robin(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    """A common turn would always give the same one of two instances to requests that alternate."""
    instances = start_mixed(stand_in, ("a",), ("a",), ("b",), ("b",))
    router = make_router(*instances, policy="round_robin")
    for number in range(16):
        assert router.chat(model="ab"[number % 2]).status_code == 200
    assert [len(each.received) for each in instances] == [4] * 4


def test_a_failed_request_is_retried_only_at_its_model(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    broken, good, other = start_mixed(stand_in, ("a",), ("a",), ("b",))
    broken.behave = answers(500)
    router = make_router(broken, good, other)
    assert [router.chat(model="a").status_code for _ in range(4)] == [200] * 4
    good.behave = answers(500)
    assert router.chat(model="a").status_code == 500
    assert other.received == []


class TestWorkers:
    """Two processes of one router."""

    def test_both_know_the_models_after_one_has_asked(self, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
        instances = start_mixed(stand_in, ("a",), ("b",))
        _, second = make_router(*instances, workers=2).workers
        assert list_models(second) == [["a"], ["b"]]
        assert [each.models_asked for each in instances] == [1, 1]
        assert second.chat(model="c").status_code == 404
        assert second.chat(model="b").status_code == 200
        assert count_models(instances[1]) == {"b": 1}

    def test_another_model_at_a_known_address_is_known_to_both(
        self, make_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        instances = start_mixed(stand_in, ("a",), ("b",))
        first, second = make_router(*instances, workers=2).workers
        instances[1].models = ("c",)
        instances[1].register(first.url, connector_port=9)  # another process
        for worker in (first, second):
            assert worker.chat(model="c").status_code == 200
            assert worker.chat(model="b").status_code == 404


def test_a_restarted_router_knows_the_models_before_it_requests_them(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Any
) -> None:
    instances = start_mixed(stand_in, ("a",), ("b",))
    settings = {"snapshot_path": str(tmp_path / "snapshot")}
    make_router(*instances, **settings).app.snapshot.save()  # type: ignore[union-attr]
    instances[1].health = 503
    after = make_router(**settings)
    wait_until(lambda: after.chat(model="a").status_code == 200, "the probes")
    assert after.chat(model="b").status_code == 503
    assert count_models(instances[0]) == {"a": 1}
