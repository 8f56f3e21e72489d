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
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.console.drain.POLL_SECONDS", 0.02)
    monkeypatch.setattr("router.console.drain.EMPTY_SECONDS", 0.1)


@contextlib.contextmanager
def run_request(router: RouterUnderTest) -> Iterator[None]:
    """Run a stream during the block, then read it to its end."""
    with router.stream() as response:
        pieces = response.iter_raw()
        next(pieces)
        yield
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


class Draining(threading.Thread):
    """``kvrouter drain`` in a thread."""

    def __init__(self, *argv: str) -> None:
        super().__init__(daemon=True)
        self._argv = argv
        self.status: int | None = None
        self.start()

    def run(self) -> None:
        self.status = main(self._argv)

    def wait(self) -> int:
        self.join(30)
        assert self.status is not None, "kvrouter drain does not end"
        return self.status


def at(router: RouterUnderTest) -> tuple[str, str, str]:
    """Return the flags to drain an instance at this router, even the last one of a role."""
    return "--router", router.url, "--force"


def get_state(router: RouterUnderTest, instance: StandIn) -> str:
    known = router.app.registry.get(instance.key)
    assert known is not None
    return known.state


def test_a_drain_prints_the_number_of_running_requests(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main([instance.key, "--router", router.url.removeprefix("http://"), "--force"]) == 0
    assert capsys.readouterr().out == f"{instance.key} is draining, with 0 requests running\n"


def test_with_wait_the_program_waits_for_the_requests_of_all_workers(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end, other_may_end = threading.Event(), threading.Event()
    instance, second_instance = (
        stand_in("mixed", streams_until(may_end)),
        stand_in("mixed", streams_until(other_may_end)),
    )
    first, second = make_router(instance, second_instance, workers=2).workers
    for each in (first, second):  # so that all requests go to the first instance
        each.client.post("/admin/weight", json={"instance": second_instance.key, "weight": 0})
    with run_request(second):
        draining = Draining(instance.key, second_instance.key, "--wait", *at(first))
        wait_until(lambda: get_state(second, instance) == "draining", "the drain")
        printed: list[str] = []

        def is_printed(sentence: str) -> bool:
            printed.append(capsys.readouterr().out)
            return sentence in "".join(printed)

        wait_until(lambda: is_printed(f"{second_instance.key} is empty"), "the message about the second instance")
        assert is_printed(f"{instance.key} is draining, with 1 request running\n")
        assert draining.is_alive()
        may_end.set()
    assert draining.wait() == 0
    rest = capsys.readouterr().out
    assert re.fullmatch(
        rf"{instance.key} is draining, with 0 requests running\n{instance.key} is empty after \d+ s\n", rest
    )


def test_a_request_that_runs_longer_than_the_wait_is_reported(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end = threading.Event()
    instance = stand_in("mixed", streams_until(may_end))
    router = make_router(instance)
    with run_request(router):
        assert main([instance.key, "--wait", "0.2", *at(router)]) == 1
        assert capsys.readouterr().err == (f"kvrouter drain: {instance.key} still has 1 request running after 0.2 s\n")
        may_end.set()


def test_undrain_cancels_the_drain(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main([instance.key, *at(router)]) == 0
    assert main([instance.key, "--undrain", *at(router)]) == 0
    assert capsys.readouterr().out.endswith(f"{instance.key} is healthy, with 0 requests running\n")
    assert router.chat().status_code == 200


@pytest.mark.parametrize(
    ("is_resumed", "message"),
    [
        pytest.param(True, "takes requests again: it was restarted, or somebody cancelled the drain", id="undrained"),
        pytest.param(False, "is no longer registered at the router", id="gone"),
    ],
)
def test_the_wait_ends_if_the_instance_is_resumed_or_removed(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], is_resumed: bool, message: str
) -> None:
    may_end = threading.Event()
    instance = stand_in("mixed", streams_until(may_end))
    router = make_router(instance)
    with run_request(router):
        draining = Draining(instance.key, "--wait", *at(router))
        wait_until(lambda: get_state(router, instance) == "draining", "the drain")
        known = router.app.registry.get(instance.key)
        assert known is not None
        if is_resumed:
            router.client.post("/admin/resume", json={"instance": instance.key})
        else:
            router.thread.loop.call_soon_threadsafe(router.app.registry.remove, known)
        assert draining.wait() == 1
        may_end.set()
    assert capsys.readouterr().err == f"kvrouter drain: {instance.key} {message}\n"


def test_a_hook_in_a_pod_needs_only_the_instances_port_and_the_register_token(
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
    assert get_state(router, instance) == "draining"
    known = router.app.registry.get(instance.key)
    assert known is not None
    assert known.drains_until_restart


def test_until_restart_warns_of_an_earlier_drain_that_a_restart_does_not_end(
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


def test_the_own_address_is_that_of_the_connection_to_the_router() -> None:
    assert find_own_address("http://127.0.0.1:1") == "127.0.0.1"


def test_a_hook_repeats_its_drain_at_a_router_that_has_lost_it(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    may_end = threading.Event()
    instance = stand_in("mixed", streams_until(may_end))
    router = make_router(instance)
    with run_request(router):
        draining = Draining("--self-port", str(instance.port), "--wait", *at(router))
        wait_until(lambda: get_state(router, instance) == "draining", "the drain")
        router.client.post("/admin/resume", json={"instance": instance.key})
        wait_until(lambda: get_state(router, instance) == "draining", "the second drain")
        may_end.set()
    assert draining.wait() == 0


def test_the_wait_for_an_unreachable_router_ends_with_one_sentence(
    stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr("router.console.drain.AWAY_SECONDS", 0.2)
    assert main(["127.0.0.1:1", "127.0.0.1:2", "--wait", "--router", f"127.0.0.1:{port}"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"kvrouter drain: the router at http://127.0.0.1:{port} does not answer")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no instance to drain is named; give HOST:PORT or, for the instance on this machine, --self-port PORT"),
        (["h:1", "--undrain", "--wait"], "--undrain cancels a drain and --wait is for a drain; give only one of them"),
        (["--wait", "h:1"], "'h:1' is not a number of seconds above 0; if it is an instance, write it before --wait"),
        (["--self-port", "0"], "'0' is not a port, a number from 1 to 65535"),
    ],
)
def test_an_invalid_command_line_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--wait", "5"], ["--until-restart"]])
def test_the_last_instance_of_a_role_is_drained_only_with_force(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    prefill, decode, other = stand_in("prefill"), stand_in("decode"), stand_in("decode")
    router = make_router(prefill, decode, other, splitwise=True)
    router_flags = ["--router", router.url]
    assert main([decode.key, *flags, *router_flags]) == 0
    assert main([prefill.key, other.key, *flags, *router_flags]) == 1
    printed = capsys.readouterr().err
    assert printed == (
        "kvrouter drain: no decode instance of m and no prefill instance of m would take requests any more; nothing "
        "was drained. Start another instance first, or use --force\n"
    )
    assert (get_state(router, prefill), get_state(router, other)) == ("healthy", "healthy")
    assert main([other.key, *flags, *router_flags, "--force"]) == 0
    assert get_state(router, other) == "draining"


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1), ("", 1)])
def test_on_a_terminal_the_last_instance_is_drained_only_after_a_yes(
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
    assert get_state(router, instance) == ("draining" if status == 0 else "healthy")


def test_a_hook_drains_the_last_instance_with_a_warning(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main(["--self-port", instance.key.rpartition(":")[2], "--router", router.url]) == 0
    assert capsys.readouterr().err == "kvrouter drain: warning: no mixed instance of m would take requests any more\n"


def test_the_refusal_of_an_unknown_instance_lists_the_known_ones(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main(["127.0.0.1:1", "--wait", *at(router)]) == 1
    assert capsys.readouterr().err == (
        f"kvrouter drain: the router at {router.url} refused /admin/drain: no instance '127.0.0.1:1' is registered; "
        f"known are: {instance.key}\n"
    )


def test_on_a_terminal_the_last_message_about_an_instance_remains(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    instance = stand_in()
    router = make_router(instance)
    assert main([instance.key, "--wait", *at(router)]) == 0
    assert re.search(rf"{instance.key} is empty after \d+ s\n$", capsys.readouterr().out)
