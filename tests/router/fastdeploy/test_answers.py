"""Checks of FastDeploy's tests of its routers that no other test of ours makes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest

from router.launch.logs import open_log
from router.policies import InstanceLoad
from router.policies.base import _encode_prompt, chunk_hashes
from router.settings import RouterSettings
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Behaviour, answers, chat_answer, never_answers, stalls
from tests.support.waiting import wait_until


@pytest.mark.parametrize("texts", [["hello"], ["hello", "hi", "how are you"], []])
def test_a_chats_texts_are_compared_in_their_order(texts: list[str]) -> None:
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, texts, strict=False)]
    compared = _encode_prompt({"messages": messages}).decode()
    places = [compared.index(f'"{content}"') for content in texts]
    assert places == sorted(places)
    assert bool(compared) is bool(texts)


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"prompt": ["first", "second", "third"]}, ["first", "second", "third"]),
        ({"prompt": ["", "hello", ""]}, ["hello"]),
        ({"prompt": ""}, []),
        ({"prompt": []}, []),
        ({"other": "field"}, []),
    ],
)
def test_prompts_are_compared_in_their_order(body: dict[str, Any], texts: list[str]) -> None:
    compared = _encode_prompt(body).decode()
    places = [compared.index(each) for each in texts]
    assert places == sorted(places)
    assert chunk_hashes(body) == []  # less than one chunk has no hash


def test_a_connector_port_that_is_missing_is_0_for_prefill_instances(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router, decode = make_router(splitwise=True), stand_in("decode")
    decode.register(router.url, connector_port=None)
    (listed,) = router.client.get("/decode_instances").json()
    assert listed["connector_port"] == "0"


def test_health_generate_probes_the_pair(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True, dialect="go")
    before = prefill.probes, decode.probes
    answer = router.client.get("/health_generate")
    assert (answer.status_code, answer.json()) == (200, {"code": 200, "msg": "Health check complete"})
    assert (prefill.probes, decode.probes) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("hanging", [stalls("first-chunk"), never_answers], ids=["in a stream", "before its response"])
def test_a_prefill_that_hangs_after_decodes_response_is_ended(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, hanging: Behaviour
) -> None:
    monkeypatch.setattr("router.serving.attempt.PREFILL_GRACE_SECONDS", 0.05)
    prefill, decode = stand_in("prefill", hanging), stand_in("decode", answers(200, chat_answer()))
    router = make_router(prefill, decode, splitwise=True)
    assert router.chat().status_code == 200
    loads = [each.load for each in router.app.registry]
    wait_until(lambda: prefill.running == 0 and not any(load.requests for load in loads), "prefill's end")


def test_a_request_and_its_tokens_are_counted_until_they_end() -> None:
    load = InstanceLoad("test")
    load.add_request(tokens=100, work=100.0)
    assert (load.requests, load.tokens) == (1, 100)
    load.remove_prefill(tokens=50, work=50.0)
    assert (load.requests, load.tokens) == (1, 50)
    load.remove_request(tokens=50, work=50.0)
    assert (load.requests, load.tokens, load.queued) == (0, 0, 0.0)


def test_a_request_that_ends_twice_is_subtracted_once(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in("mixed", stalls("1")))
    (instance,) = router.app.registry
    with router.stream() as response:
        pieces = response.iter_raw()  # a reference, so that the client does not close the stream
        next(pieces)
        (serving,) = router.app.proxy._live
        attempt = serving.attempt
        assert attempt is not None
        assert instance.load.requests == 1

        async def finish_twice() -> tuple[int, int]:
            attempt.answering.finish()
            once = instance.load.requests
            attempt.answering.finish()
            return once, instance.load.requests

        assert router.thread.run(finish_twice()) == (0, 0)


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    """The root logger without handlers. The fixture restores the handlers and the levels."""
    loggers = [logging.getLogger(name) for name in (None, "router", "uvicorn")]
    root, levels = loggers[0], [logger.level for logger in loggers]
    handlers, root.handlers = root.handlers, []
    yield root
    opened, root.handlers = root.handlers, handlers
    for handler in opened:
        if isinstance(handler, RotatingFileHandler):  # the others are not ours
            handler.close()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("root_log")
def test_the_log_goes_to_a_file_in_the_folder_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_log(RouterSettings(log_level="debug", log_output="file"))
    logging.getLogger("router.test").info("started")
    assert "started" in (tmp_path / "logs" / "router.log").read_text()


@pytest.mark.usefixtures("root_log")
@pytest.mark.parametrize("level", ["debug", "info", "warn", "error"])
def test_each_log_level_includes_the_higher_levels(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    open_log(RouterSettings(log_level=level, log_output="stdout"))
    log, levels = logging.getLogger("router.test"), ["debug", "info", "warn", "error"]
    for name in levels:
        log.log(getattr(logging, name.upper()), "%s message", name)
    written = capsys.readouterr().out
    assert [name for name in levels if f"{name} message" in written] == levels[levels.index(level) :]


def test_counters_have_help_and_type_before_the_first_request(make_router: MakeRouter) -> None:
    text = make_router(dialect="go").client.get("/metrics").text
    assert "# HELP http_requests_total Total number of HTTP requests" in text
    assert "# HELP inference_requests_total Total number of inference requests" in text
    for name in ("http_requests_total", "inference_requests_total", "http_request_duration_seconds"):
        assert f"# TYPE {name} " in text
