"""kvrouter drain. Instances are stand-ins."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.console.client import find_own_address
from router.console.drain import main
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import StandIn, streams_until
from tests.support.ports import free_port
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.console.drain.POLL_SECONDS", 0.02)
    monkeypatch.setattr("router.console.drain.EMPTY_SECONDS", 0.1)


@contextlib.contextmanager
def run_request(router: RouterUnderTest) -> Iterator[None]:
    """A stream that runs, and at the end has been whole."""
    with router.stream() as response:
        pieces = response.iter_raw()
        next(pieces)
        yield
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


class Draining(threading.Thread):
    """``kvrouter drain`` beside the test."""

    def __init__(self, *argv: str) -> None:
        super().__init__(daemon=True)
        self._argv = argv
        self.status: int | None = None
        self.start()

    def run(self) -> None:
        self.status = main(self._argv)

    def wait(self) -> int:
        self.join(30)
        assert self.status is not None, "it does not end"
        return self.status


def at(router: RouterUnderTest) -> tuple[str, str, str]:
    """At this router, also the last instance of a role."""
    return "--router", router.url, "--force"


def state(router: RouterUnderTest, instance: StandIn) -> str:
    known = router.app.registry.get(instance.key)
    assert known is not None
    return known.state


def test_a_drained_instance_is_told_with_what_it_still_runs(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main([instance.key, "--router", router.url.removeprefix("http://"), "--force"]) == 0
    assert capsys.readouterr().out == f"{instance.key} is draining, with 0 requests running\n"


def test_with_wait_it_ends_when_the_last_request_has_ended_at_whichever_worker(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end, other_may_end = threading.Event(), threading.Event()
    instance, second_instance = (
        stand_in("mixed", streams_until(may_end)),
        stand_in("mixed", streams_until(other_may_end)),
    )
    first, second = make_router(instance, second_instance, workers=2).workers
    for each in (first, second):  # an instance each: equal loads take turns
        each.client.post("/admin/weight", json={"instance": second_instance.key, "weight": 0})
    with run_request(second):
        draining = Draining(instance.key, second_instance.key, "--wait", *at(first))
        wait_until(lambda: state(second, instance) == "draining", "the order")
        told: list[str] = []

        def is_told(sentence: str) -> bool:
            told.append(capsys.readouterr().out)
            return sentence in "".join(told)

        wait_until(lambda: is_told(f"{second_instance.key} is empty"), "the other instance to be empty")
        assert is_told(f"{instance.key} is draining, with 1 request running\n")
        assert draining.is_alive()
        may_end.set()
    assert draining.wait() == 0
    rest = capsys.readouterr().out
    assert re.fullmatch(
        rf"{instance.key} is draining, with 0 requests running\n{instance.key} is empty after \d+ s\n", rest
    )


def test_a_request_that_does_not_end_is_told_when_the_time_is_over(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end = threading.Event()
    instance = stand_in("mixed", streams_until(may_end))
    router = make_router(instance)
    with run_request(router):
        assert main([instance.key, "--wait", "0.2", *at(router)]) == 1
        assert capsys.readouterr().err == (f"kvrouter drain: {instance.key} still has 1 request running after 0.2 s\n")
        may_end.set()


def test_undrain_takes_the_order_back(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main([instance.key, *at(router)]) == 0
    assert main([instance.key, "--undrain", *at(router)]) == 0
    assert capsys.readouterr().out.endswith(f"{instance.key} is healthy, with 0 requests running\n")
    assert router.chat().status_code == 200


@pytest.mark.parametrize(
    ("registers", "says"),
    [
        pytest.param(True, "takes requests again: it was restarted, or somebody cancelled the drain", id="undrained"),
        pytest.param(False, "is no longer registered at the router", id="gone"),
    ],
)
def test_one_that_is_not_what_it_was_is_not_waited_for(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], registers: bool, says: str
) -> None:
    may_end = threading.Event()
    instance = stand_in("mixed", streams_until(may_end))
    router = make_router(instance)
    with run_request(router):
        draining = Draining(instance.key, "--wait", *at(router))
        wait_until(lambda: state(router, instance) == "draining", "the order")
        known = router.app.registry.get(instance.key)
        assert known is not None
        if registers:
            router.client.post("/admin/resume", json={"instance": instance.key})
        else:
            router.thread.loop.call_soon_threadsafe(router.app.registry.remove, known)
        assert draining.wait() == 1
        may_end.set()
    assert capsys.readouterr().err == f"kvrouter drain: {instance.key} {says}\n"


def test_a_hook_in_the_instances_pod_needs_its_port_and_the_token_of_instances(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    tokens = {}
    for name in ("admin", "register"):
        tokens[name] = tmp_path / name
        tokens[name].write_text(name)
    router = make_router(**{f"{name}_token_file": str(path) for name, path in tokens.items()})
    instance = stand_in()
    registered = router.client.post(
        "/register", json=instance.registration(start_id="1"), headers={"Authorization": "Bearer register"}
    )
    assert registered.status_code == 200
    hook = ["--self-port", str(instance.port), "--wait", "30", "--token-file", str(tokens["register"]), *at(router)]
    assert main(hook) == 0
    assert state(router, instance) == "draining"
    known = router.app.registry.get(instance.key)
    assert known is not None
    assert known.drains_until_restart


def test_a_drain_that_does_not_end_with_a_restart_is_told(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router, warning = make_router(instance), ": warning: "
    for flags, is_warned in (
        (["--until-restart"], False),
        (["--until-restart"], False),
        ([], False),
        (["--until-restart"], True),
        (["--undrain"], False),
        (["--until-restart"], False),
    ):
        assert main([instance.key, "--force", *flags, *at(router)]) == 0
        assert (warning in capsys.readouterr().err) == is_warned
    main([instance.key, "--force", *at(router)])
    main([instance.key, "--force", "--until-restart", *at(router)])
    assert capsys.readouterr().err == (
        f"kvrouter drain: warning: {instance.key} was already drained until --undrain; a restart does not end this "
        "drain\n"
    )


def test_this_machine_is_found_by_its_way_to_the_router() -> None:
    assert find_own_address("http://127.0.0.1:1") == "127.0.0.1"


def test_a_hook_gives_its_order_again_to_a_router_that_was_started_anew(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    may_end = threading.Event()
    instance = stand_in("mixed", streams_until(may_end))
    router = make_router(instance)
    with run_request(router):
        draining = Draining("--self-port", str(instance.port), "--wait", *at(router))
        wait_until(lambda: state(router, instance) == "draining", "the order")
        router.client.post("/admin/resume", json={"instance": instance.key})
        wait_until(lambda: state(router, instance) == "draining", "the order's return")
        may_end.set()
    assert draining.wait() == 0


def test_a_router_that_is_away_for_a_while_is_asked_again_by_those_who_wait(
    stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr("router.console.drain.AWAY_SECONDS", 0.2)
    assert main(["127.0.0.1:1", "127.0.0.1:2", "--wait", "--router", f"127.0.0.1:{port}"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"kvrouter drain: the router at http://127.0.0.1:{port} does not answer")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no instance to drain is named; give HOST:PORT or, for the instance on this machine, --self-port PORT"),
        (["h:1", "--undrain", "--wait"], "--undrain cancels a drain and --wait is for a drain; give only one of them"),
        (["--wait", "h:1"], "'h:1' is not a number of seconds above 0; if it is an instance, write it before --wait"),
        (["--self-port", "0"], "'0' is not a port, a number from 1 to 65535"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--wait", "5"], ["--until-restart"]])
def test_the_last_instance_of_its_role_is_drained_by_force_only(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    prefill, decode, other = stand_in("prefill"), stand_in("decode"), stand_in("decode")
    router = make_router(prefill, decode, other, splitwise=True)
    there = ["--router", router.url]
    assert main([decode.key, *flags, *there]) == 0
    assert main([prefill.key, other.key, *flags, *there]) == 1
    told = capsys.readouterr().err
    assert told == (
        "kvrouter drain: no decode instance of m and no prefill instance of m would take requests any more; nothing "
        "was drained. Start another instance first, or use --force\n"
    )
    assert (state(router, prefill), state(router, other)) == ("healthy", "healthy")
    assert main([other.key, *flags, *there, "--force"]) == 0
    assert state(router, other) == "draining"


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1), ("", 1)])
def test_on_a_terminal_the_last_instance_is_drained_when_somebody_says_yes(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch, answer: str, status: int
) -> None:
    instance = stand_in()
    router = make_router(instance)
    asked: list[str] = []

    def reply(question: str) -> str:
        asked.append(question)
        return answer

    monkeypatch.setattr("builtins.input", reply)
    monkeypatch.setattr("router.console.drain._is_terminal", lambda: True)
    assert main([instance.key, "--router", router.url]) == status
    assert asked == ["no mixed instance of m would take requests any more; drain anyway? [y/N] "]
    assert state(router, instance) == ("draining" if status == 0 else "healthy")


def test_an_instances_own_hook_is_warned_and_not_refused(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main(["--self-port", instance.key.rpartition(":")[2], "--router", router.url]) == 0
    assert capsys.readouterr().err == "kvrouter drain: warning: no mixed instance of m would take requests any more\n"


def test_an_instance_that_nobody_knows_is_told_with_those_that_are(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main(["127.0.0.1:1", "--wait", *at(router)]) == 1
    assert capsys.readouterr().err == (
        f"kvrouter drain: the router at {router.url} refused /admin/drain: no instance '127.0.0.1:1' is registered; "
        f"known are: {instance.key}\n"
    )


def test_on_a_terminal_the_last_word_on_each_instance_stays(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    instance = stand_in()
    router = make_router(instance)
    assert main([instance.key, "--wait", *at(router)]) == 0
    assert re.search(rf"{instance.key} is empty after \d+ s\n$", capsys.readouterr().out)
