"""``python -m router.launch`` as an operator uses it: flags, output, signals and the exit code of the process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.console import main
from router.launch import fd_router
from router.settings import RouterSettings
from tests.router.conftest import MakeStandIn
from tests.router.stand_in import Received, Responder, stalls, streams_until
from tests.support import plain_http
from tests.support.certificates import make_certificate
from tests.support.nursery import run_forked
from tests.support.ports import free_port
from tests.support.processes import Child, child
from tests.support.waiting import wait_until

LAUNCH = [sys.executable, "-m", "router.launch"]


def launch(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the router with flags with which it ends at once."""
    return run_forked([*LAUNCH, *flags])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Child]:
    """Start a router process in mixed mode at a free port."""
    command = [*LAUNCH, "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
    with child(command, tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: is_listening(process), "listening")
        yield process


def find_url(process: Child) -> str:
    found = re.search(r"router listens at (https?://\S+:\d+)", process.output)
    assert found, process.output
    return found.group(1)


def test_help_names_every_flag_of_fastdeploys_router() -> None:
    text = launch("--help").stdout
    for flag in ("--host", "--port", "--splitwise", "--request-timeout-secs", "--config-path", "--decode-policy"):
        assert flag in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--splitwize"], "did you mean --splitwise?"),
        (["--port", "x"], "--port is 'x'; it must be a whole number"),
        (["--config_path", "/no/such.yaml"], "No such file or directory"),
        (["--register-path", "/no/such.yaml"], "manager.register-path /no/such.yaml: No such file or directory"),
        (["--snapshot-path", "/no/such/file"], "there is no folder /no/such"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid is not an address"),
        (["--host", "a..b"], "--host a..b is not an address"),
        (["--ssl-certfile", "/no/such"], "server.ssl-certfile /no/such: No such file or directory"),
        (["--ssl-keyfile", "/no/such"], "but no certificate is given; set server.ssl-certfile"),
        (["--flight-recorder", "-1"], "log.flight-recorder is -1; it must be 0 or more"),
        (["--flight-recorder", "x"], "--flight-recorder is 'x'; it must be a number"),
        (
            ["--flight-recorder", "1", "--flight-recorder-path", "/no/such"],
            "log.flight-recorder-path is '/no/such', but",
        ),
        (["--snapshot-path", "."], "manager.snapshot-path is '.', which is a folder; it must be a file"),
    ],
)
def test_a_wrong_flag_gives_one_sentence_on_stderr_and_an_exit_code_of_failure(flags: list[str], message: str) -> None:
    ended = launch("--workers", "1", *flags)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_version_is_one_line() -> None:
    ended = subprocess.run([*LAUNCH, "--version"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r"kvrouter \d+\.\d+\.\d+\n", ended.stdout)


@pytest.mark.parametrize("flag", ["-V", "--V", "-version", "--version"])
def test_fd_router_prints_its_version_for_each_of_the_go_routers_flags(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fd_router([flag])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvrouter ")


def test_fd_router_is_the_router_in_the_go_routers_dialect(tmp_path: Path) -> None:
    started = [sys.executable, "-c", "import sys; from router.launch import fd_router; sys.exit(fd_router())"]
    with child([*started, "-port", "0", "-splitwise"], tmp_path / "router.log") as process:
        process.wait_for(lambda: "router listens at" in process.output, "listening")
        url = find_url(process).replace("0.0.0.0", "127.0.0.1")
        answer = plain_http.post(f"{url}/v1/chat/completions", json={"messages": []})
    assert (answer.status_code, answer.json()["error"]) == (503, "No available prefill/decode workers")


def test_the_log_goes_to_the_go_routers_file_and_names_settings_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("server: {host: 127.0.0.1, mode: debug}\nlog: {output: file}\n")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "logs" / "router.log"
    with child([*LAUNCH, "--port", "0", "--config_path", str(config)], tmp_path / "output", is_forked=True) as process:
        process.wait_for(lambda: log.exists() and "router listens at" in log.read_text(), "the startup line")
    assert "server.mode has no effect" in log.read_text()
    assert process.output == ""


def test_a_port_in_use_gives_one_sentence_and_an_exit_code_of_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = launch("--host", "127.0.0.1", "--port", str(port))
    assert ended.returncode != 0
    assert ended.stderr == f"router: port {port} of 127.0.0.1 is already in use; choose another with --port\n"


def test_the_start_waits_for_a_port_that_a_closed_connection_uses(tmp_path: Path) -> None:
    # Linux can give a port that it chooses to several connections, so that the end of this one does not release it.
    here = ("127.0.0.1", free_port())
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=here) as client,
    ):
        port = client.getsockname()[1]
        accepted, _ = server.accept()
        command = [*LAUNCH, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        with child(command, tmp_path / "router.log", is_forked=True) as process:
            process.wait_for(lambda: f"waiting for port {port}, which a closed connection" in process.output, "waiting")
            accepted.close()
            client.recv(1)  # the server closes first, so that the client's port is free
            client.close()
            process.wait_for(lambda: "router listens at" in process.output, "its start")


def test_a_warning_for_all_workers_is_logged_once(tmp_path: Path) -> None:
    with child([*LAUNCH, "--port", "0", "--workers", "2"], tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: "router listens at" in process.output, "its start")
        assert process.output.count("any client that reaches 0.0.0.0") == 1


def test_the_startup_line_has_the_policies_of_both_roles(tmp_path: Path) -> None:
    flags = ["--host", "127.0.0.1", "--port", "0", "--workers", "1", "--splitwise", "--decode-policy", "random"]
    with child([*LAUNCH, *flags], tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: "router listens at" in process.output, "the startup line")
        assert "prefill by pool_aware, decode by random" in process.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_https_router_logs_its_url_and_ends_at_a_signal_although_a_client_is_connected(
    tmp_path: Path, number: signal.Signals
) -> None:
    made = make_certificate(tmp_path)
    flags = ["--port", "0", "--ssl-certfile", str(made.certfile), "--ssl-keyfile", str(made.keyfile)]
    with child([*LAUNCH, "--host", "127.0.0.1", *flags], tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: "router listens at https://127.0.0.1:" in process.output, "the startup line")
        with httpx.Client(base_url=find_url(process), verify=made.trust(), trust_env=False) as client:
            assert client.get("/health").status_code == 200
            process.signal(number)
            assert process.wait(5.0) == 0
        assert "Traceback" not in process.output


@pytest.mark.parametrize("entry", ["", "router.console import main", "router.launch import fd_router as main"])
def test_ctrl_c_while_modules_are_loaded_shows_no_traceback(tmp_path: Path, entry: str) -> None:
    command = [sys.executable, "-c", f"import sys; from {entry}; sys.exit(main())"] if entry else LAUNCH
    (tmp_path / "uvloop.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_router_with_0_and_no_traceback(running: Child, number: signal.Signals) -> None:
    running.signal(number)
    assert running.wait() == 0
    assert "Traceback" not in running.output


def test_a_running_stream_can_end_after_sigterm(running: Child, stand_in: MakeStandIn) -> None:
    must_go_on = asyncio.Event()

    async def end_late(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("1")
        await must_go_on.wait()
        await asyncio.sleep(RouterSettings().graces[signal.SIGINT] + 0.5)  # longer than the limit at Ctrl-C
        await respond.event("[DONE]")
        await respond.end_stream()

    instance = stand_in("mixed", end_late)
    assert instance.register(find_url(running)).status_code == 200
    with plain_http.stream("POST", f"{find_url(running)}/v1/chat/completions", json={}) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        running.signal(signal.SIGTERM)
        wait_until(lambda: refuses(running), "the router to accept no connections")
        instance.thread.loop.call_soon_threadsafe(must_go_on.set)
        assert b"".join(pieces) == b"data: [DONE]\n\n"
    assert running.wait() == 0


def is_listening(process: Child) -> bool:
    return "router listens at" in process.output and plain_http.answers_ok(f"{find_url(process)}/health")


def get_readiness(process: Child) -> int:
    try:
        return plain_http.get(f"{find_url(process)}/ready").status_code
    except httpx.TransportError:
        return 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_router_accepts_requests_during_its_shutdown_delay(
    tmp_path: Path, stand_in: MakeStandIn, workers: str
) -> None:
    flags = ["--port", "0", "--workers", workers, "--shutdown-delay-secs", "300", "--shutdown-grace-secs", "20"]
    with child([*LAUNCH, "--host", "127.0.0.1", *flags], tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: is_listening(process), "listening")
        stand_in().register(find_url(process))
        wait_until(lambda: get_readiness(process) == 200, "the router to be ready")
        process.signal(signal.SIGTERM)
        wait_until(lambda: get_readiness(process) == 503, "the router to be not ready")
        chat = plain_http.post(f"{find_url(process)}/v1/chat/completions", json={"messages": []})
        assert (chat.status_code, chat.headers["connection"]) == (200, "close")
        assert "requests are accepted for 300 s more" in process.output
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_router_ends_when_its_delay_is_over(tmp_path: Path) -> None:
    flags = ["--port", "0", "--workers", "1", "--shutdown-delay-secs", "0.1"]
    with child([*LAUNCH, "--host", "127.0.0.1", *flags], tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: is_listening(process), "listening")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_slow_stop_logs_the_number_of_running_requests(running: Child, stand_in: MakeStandIn) -> None:
    instance = stand_in("mixed", streams_until(may_end := threading.Event()))
    instance.register(find_url(running))
    with plain_http.stream("POST", f"{find_url(running)}/v1/chat/completions", json={}) as response:
        pieces = response.iter_raw()
        next(pieces)
        running.signal(signal.SIGTERM)
        wait_until(lambda: "stopping: waiting for 1 running request, for 2" in running.output, "the line")
        may_end.set()
        assert b"".join(pieces) == b"data: [DONE]\n\n"
    assert running.wait() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_the_requests_of_a_killed_router_can_be_replayed(
    tmp_path: Path, stand_in: MakeStandIn, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    good, hanging = stand_in(), stand_in("mixed", stalls("1"))
    folder = tmp_path / "flight"
    flags = ["--flight-recorder", "5", "--flight-recorder-path", str(folder), "--workers", str(workers)]
    command = [*LAUNCH, "--host", "127.0.0.1", "--port", "0", "--access-log", "off", *flags]

    def show() -> str:
        main(["replay", str(folder)])
        return capfd.readouterr().out

    with child(command, tmp_path / "router.log", is_forked=True) as process:
        process.wait_for(lambda: is_listening(process), "listening")
        url = find_url(process)
        good.register(url)
        plain_http.post(f"{url}/v1/chat/completions", json={"request_id": "ended", "messages": []})
        hanging.register(url)
        plain_http.post(f"{url}/admin/drain", json={"instance": good.key})
        with plain_http.stream(
            "POST", f"{url}/v1/chat/completions", json={"request_id": "cut", "messages": []}, timeout=30
        ) as response:
            pieces = response.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            wait_until(lambda: "request cut arrives" in show() and "ended ends" in show(), "the entries")
            process.signal(signal.SIGKILL)
    shown = show()
    assert "request ended ends: 200; tokens: 1 prompt" in shown
    assert f"request cut attempt 1 goes to {hanging.key}" in shown
    assert f"mixed instance {good.key} drains" in shown
    assert shown.count("the recording begins") == workers
    if workers == 1:  # several workers end normally after their supervisor is killed
        assert "request cut had not ended" in shown
        assert shown.endswith("the recording ends here: the process still runs, or was killed\n")


@pytest.mark.parametrize("switch", ["flag", "variable"])
def test_the_log_level_debug_logs_decisions_and_requests(tmp_path: Path, stand_in: MakeStandIn, switch: str) -> None:
    instance = stand_in()
    texts = {}
    for level in ("info", "debug"):
        flags = ["--log-level", level] if switch == "flag" else []
        environ = {**os.environ, "FD_DEBUG": "1" if level == "debug" else "0"}
        command = [*LAUNCH, "--host", "127.0.0.1", "--port", "0", "--workers", "1", "--access-log", "off", *flags]
        if switch == "flag":
            environ.pop("FD_DEBUG")
        with child(command, tmp_path / f"{level}.log", env=environ, is_forked=True) as process:
            process.wait_for(lambda process=process: "router listens at" in process.output, "listening")  # type: ignore[misc]
            url = find_url(process)
            instance.register(url)
            plain_http.post(f"{url}/v1/chat/completions", json={"request_id": "r"})
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
            texts[level] = process.output
    assert "request r, attempt 1: mixed" not in texts["info"]
    assert f"request r, attempt 1: mixed {instance.key} because of policy=pool_aware" in texts["debug"]
    assert "request r: POST /v1/chat/completions 200" in texts["debug"]
    assert "asyncio" not in texts["debug"]


def refuses(running: Child) -> bool:
    try:
        plain_http.get(f"{find_url(running)}/health")
    except httpx.TransportError:  # refused, or accepted and closed
        return True
    return False


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_ctrl_c_or_a_second_signal_ends_a_running_stream_with_an_error_event_and_an_abort(
    running: Child, stand_in: MakeStandIn, signals: list[signal.Signals]
) -> None:
    instance = stand_in("mixed", stalls("1"))
    assert instance.register(find_url(running)).status_code == 200
    with plain_http.stream(
        "POST", f"{find_url(running)}/v1/chat/completions", json={"request_id": "r"}, timeout=30
    ) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        for number in signals:
            running.signal(number)
            wait_until(lambda: refuses(running), "the router to accept no connections")
        rest = b"".join(pieces)
    error, done = rest.decode().removesuffix("\n\n").split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "router_stopping"
    assert done == "data: [DONE]"
    assert running.wait() == 0
    assert "Traceback" not in running.output
    wait_until(lambda: instance.aborted == [{"req_ids": ["chatcmpl-r_0"]}], "the abort")


def test_a_client_that_does_not_read_does_not_delay_the_end(running: Child, stand_in: MakeStandIn) -> None:
    responders: list[Responder] = []

    async def stream_endlessly(request: Received, respond: Responder) -> None:
        responders.append(respond)
        await respond.start_stream()
        while not respond.peer_left.is_set():
            await respond.chunk(b"data: " + b"x" * 65536 + b"\n\n")
        respond.keep_alive = False

    instance = stand_in("mixed", stream_endlessly)
    instance.register(find_url(running))
    with socket.create_connection(("127.0.0.1", int(find_url(running).rpartition(":")[2]))) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        wait_until(lambda: responders and responders[0].bytes_sent > 1 << 20, "the stream to fill the buffers")
        running.signal(signal.SIGINT)
        assert running.wait() == 0
    assert "Traceback" not in running.output
    wait_until(lambda: len(instance.aborted) == 1, "the abort")


def test_each_request_is_one_line_of_the_access_log(running: Child) -> None:
    plain_http.post(f"{find_url(running)}/v1/chat/completions", json={"request_id": "r"})
    wait_until(lambda: '"path":"/v1/chat/completions"' in running.output, "the line")
    (line,) = [line for line in running.output.splitlines() if line.startswith("{")]
    assert {name: json.loads(line)[name] for name in ("method", "path", "status", "error", "request_id")} == {
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 503,
        "error": "no_instance",
        "request_id": "r",
    }
