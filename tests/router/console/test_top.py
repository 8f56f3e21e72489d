"""kvrouter top. Instances are stand-ins with counters that grow; the terminal is a real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.console.top import main
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Behaviour, Received, Responder, answers, chat_answer
from tests.support.ports import free_port
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _use_long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, no request times out."""
    for module in ("client", "dashboard.scraper"):
        monkeypatch.setattr(f"router.console.{module}.TIMEOUT_SECONDS", 60.0)


def counts(waiting: int, on_first_poll: Callable[[], object] | None = None) -> Behaviour:
    """Count a quarter of the prompt tokens as loaded from the pool, and the rest as computed."""
    polls = 0

    async def behave(request: Received, respond: Responder) -> None:
        nonlocal polls
        page = chat_answer()
        if request.target == "/metrics":
            polls += 1
            if polls == 1 and on_first_poll is not None:
                await asyncio.to_thread(on_first_poll)
            page = (
                f'kvstore_prompt_tokens_total{{origin="pool"}} {100 * polls}\n'
                f'kvstore_prompt_tokens_total{{origin="computed"}} {300 * polls}\n'
                f"fastdeploy:num_requests_waiting {waiting}\n"
            ).encode()
        await respond.answer(200, page, ("content-type", "application/json"))

    return behave


def test_once_prints_the_router_the_prompts_and_each_instance(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    calm, busy = stand_in(behave=counts(0)), stand_in(behave=counts(7))
    router = make_router(calm, busy)
    router.client.post("/admin/weight", json={"instance": calm.key, "weight": 0.25})
    calm.behave = counts(0, router.chat)  # between two polls: a poll reads the router's metrics first
    at = ["--router", router.url.removeprefix("http://"), "--once", "--interval", "0.1"]
    assert main([*at, "--sort", "waiting"]) == 0
    head, quantiles, bar, legend, _, titles, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == router.url.removeprefix("http://")
    assert " failed 0  refused 0  of 1 in " in head
    assert quantiles == "first token: no streams  each further token: no streams"
    assert bar.split()[1] == "▓" * 15 + "░" * 45
    assert legend.split("  ")[-2:] == ["▓ pool 25 %", "░ computed 75 %"]
    assert titles.split()[:6] == ["instance", "role", "state", "running", "tokens", "waiting"]
    assert [row.split() for row in rows] == [
        [busy.key, "mixed", "healthy", "0", "0", "7", "\u2013", "25", "%", "closed", "1"],
        [calm.key, "mixed", "healthy", "0", "0", "0", "\u2013", "25", "%", "closed", "0.25"],
    ]


def test_without_the_admin_token_it_prints_loads_and_names_the_flag(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret\n")
    instance = stand_in(behave=counts(0))
    router = make_router(admin_token_file=str(tmp_path / "token"))
    router.client.headers["authorization"] = "Bearer secret"
    wait_until(
        lambda: router.client.post("/register", json=instance.registration()).json() == {"status": "success"},
        "the registration",
    )
    assert main(["--router", router.url, "--once", "--interval", "0.1"]) == 0
    printed = capsys.readouterr().out
    lines = " ".join(printed.split())
    assert (
        "requires its admin token for /registered; give the token's file with --token-file. Without the "
        "token, only loads are known." in lines
    )
    assert [line.split()[:4] for line in printed.splitlines()][-1] == [instance.key, "mixed", "\u2013", "0"]


def test_an_instance_without_metrics_is_reported_in_one_sentence(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(_: Received, respond: Responder) -> None:
        await respond.answer(404, b"")

    instance = stand_in(behave=refuse)
    assert main(["--router", make_router(instance).url, "--once", "--interval", "0.1"]) == 0
    message = f"{instance.key}: {instance.url}/metrics answers with status 404.\n"
    assert capsys.readouterr().out.endswith(message)


def test_one_report_does_not_say_that_an_earlier_minute_was_without_prompts(
    make_router: MakeRouter, stand_in: MakeStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    router = make_router(stand_in(behave=answers(200, b'kvstore_prompt_tokens_total{origin="pool"} 64\n')))
    assert main(["--router", router.url, "--once", "--interval", "0.1"]) == 0
    assert "prompts  no tokens in this time\n" in capsys.readouterr().out


def test_a_router_that_does_not_answer_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    at = f"127.0.0.1:{free_port()}"
    assert main(["--router", at]) == 1
    assert capsys.readouterr().err.startswith(f"kvrouter top: the router at http://{at} does not answer: ")


def test_an_error_in_the_command_line_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--interval", "0"]) == 2
    assert capsys.readouterr().err.endswith("'0' is not a number of seconds from 0.1 to 60\n")


class Terminal:
    """A program in a terminal."""

    def __init__(self, *argv: str, columns: int, lines: int) -> None:
        self.fd, self._inside = pty.openpty()
        self.settings = termios.tcgetattr(self._inside)
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)}
        ends = {"stdin": self._inside, "stdout": self._inside, "stderr": self._inside}
        self._process = subprocess.Popen([sys.executable, *argv], **ends, env=environ, start_new_session=True)  # type: ignore[call-overload]
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.fd, 65536):
                self.shown += data.decode(errors="replace")

    def type_key(self, key: str) -> None:
        self.shown = ""
        os.write(self.fd, key.encode())

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.shown, text, 60)

    def wait(self) -> int:
        status: int = self._process.wait(60)
        return status

    @property
    def settings_now(self) -> list[object]:
        return termios.tcgetattr(self._inside)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        os.close(self._inside)
        self._reader.join(20)
        os.close(self.fd)


@pytest.fixture
def run_in_terminal() -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as opened:

        def run(*argv: str, columns: int = 120, lines: int = 30) -> Terminal:
            code = "import sys; from router.console import main; sys.exit(main())"
            terminal = Terminal("-c", code, *argv, columns=columns, lines=lines)
            opened.callback(terminal.close)
            return terminal

        yield run


def test_in_a_terminal_keys_sort_q_ends_the_program_and_a_lost_router_is_reported(
    make_router: MakeRouter, stand_in: MakeStandIn, run_in_terminal: Callable[..., Terminal]
) -> None:
    instance = stand_in(behave=counts(3))
    router = make_router(instance)
    terminal = run_in_terminal("top", "--router", router.url, "--interval", "0.2")
    terminal.wait_for(instance.key)
    assert "by load; keys: l load" in terminal.shown
    terminal.type_key("a")
    terminal.wait_for("by address; keys: ")
    router.stop()
    terminal.wait_for(f"the router at {router.url} does not answer")
    terminal.wait_for("The next poll follows.")
    terminal.type_key("w")
    terminal.wait_for("by waiting; keys: ")
    assert instance.key in terminal.shown, "the instance is missing without the router"
    terminal.type_key("q")
    assert terminal.wait() == 0
    assert terminal.settings_now == terminal.settings


def test_a_terminal_of_80_columns_shows_whole_addresses_and_all_columns(
    make_router: MakeRouter, stand_in: MakeStandIn, run_in_terminal: Callable[..., Terminal]
) -> None:
    instance = stand_in(behave=counts(3))
    router = make_router(instance)
    terminal = run_in_terminal("top", "--router", router.url, "--interval", "0.2", columns=80)
    terminal.wait_for(instance.key)
    terminal.wait_for("weight")


def test_a_terminal_without_room_for_instances_shows_their_number(
    make_router: MakeRouter, stand_in: MakeStandIn, run_in_terminal: Callable[..., Terminal]
) -> None:
    router = make_router(stand_in(behave=counts(3)), stand_in(behave=counts(3)))
    terminal = run_in_terminal("top", "--router", router.url, "--interval", "0.2", lines=8)
    terminal.wait_for("and 2 more instances")
