"""The sidecar ``python -m router.register``, which registers a server at a router."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from router.fleet import Role
from router.register import main
from tests.examples.readme import README
from tests.examples.script import ROOT
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import Behaviour, Received, Responder, StandIn
from tests.support.certificates import make_certificate
from tests.support.nursery import run_forked
from tests.support.ports import free_port
from tests.support.processes import Child, child
from tests.support.waiting import wait_until

REGISTER = [sys.executable, "-m", "tests.router.quick_sidecar"]
Run = Callable[..., AbstractContextManager[Child]]


@pytest.fixture
def run_sidecar(tmp_path: Path) -> Run:
    """A function that starts a sidecar with frequent heartbeats for a server's port."""

    @contextlib.contextmanager
    def start(router: str, port: int, *flags: str) -> Iterator[Child]:
        command = [*REGISTER, "--router", router, "--port", str(port), *flags]
        with child(command, tmp_path / "sidecar.log", is_forked=True) as sidecar:
            yield sidecar

    return start


def list_health(router: RouterUnderTest) -> dict[str, bool]:
    return {instance.key: instance.healthy for instance in router.app.registry}


def test_a_server_that_cannot_register_itself_gets_requests(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    server, router = stand_in(), make_router()
    with run_sidecar(f"127.0.0.1:{router.port}", server.port, "--connector-port", "8001"):
        wait_until(lambda: list_health(router) == {f"127.0.0.1:{server.port}": True}, "the registration")
        assert router.chat().status_code == 200
        (instance,) = router.app.registry
        assert (instance.registration.role.value, instance.registration.connector_port) == ("mixed", "8001")


def test_a_server_that_is_not_a_router_is_reported(stand_in: Callable[..., StandIn], run_sidecar: Run) -> None:
    other = stand_in("mixed", reports({"/register": "a page"}))
    with run_sidecar(other.url, stand_in().port, "--engine", "openai") as sidecar:
        sidecar.wait_for(lambda: f"the server at {other.url} is not a router: " in sidecar.output, "the warning")
        assert "registered at" not in sidecar.output


VERSION = {"/version": {"version": "0.32.0"}}
SGLANG = {"disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998, "version": "0.5.23"}


def reports(answers: dict[str, Any]) -> Behaviour:
    """Answer each path with its JSON value or, if it is a number, with this status; other paths with 404."""

    async def behave(request: Received, respond: Responder) -> None:
        answer = answers.get(request.target, 404)
        status, content = (answer, {}) if isinstance(answer, int) else (200, answer)
        await respond.answer(status, json.dumps(content).encode())

    return behave


@pytest.mark.parametrize(
    ("owner", "answers", "engine"),
    [
        ("", VERSION, "vllm"),
        ("fastdeploy-kvstore", {}, "fastdeploy"),
    ],
)
def test_the_sidecar_asks_the_server_for_its_engine(
    *,
    stand_in: Callable[..., StandIn],
    make_router: Callable[..., RouterUnderTest],
    run_sidecar: Run,
    owner: str,
    answers: dict[str, Any],
    engine: str,
) -> None:
    server, router = stand_in("mixed", reports(answers)), make_router()
    server.owner = owner
    with run_sidecar(router.url, server.port) as sidecar:
        sidecar.wait_for(lambda: f": {engine} mixed at port {server.port}" in sidecar.output, "the registration")
    (instance,) = router.app.registry
    assert instance.registration.engine.value == engine
    assert instance.registration.takes_cache_salt == (engine == "vllm" or owner == "fastdeploy-kvstore")


def test_a_router_of_the_go_routers_dialect_accepts_the_registration(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    server, router = stand_in(), make_router(dialect="go")
    with run_sidecar(router.url, server.port) as sidecar:
        sidecar.wait_for(lambda: f"mixed at port {server.port}" in sidecar.output, "the registration")
    assert [instance.key for instance in router.app.registry] == [server.key]


def test_an_sglang_server_reports_its_role_and_its_bootstrap_port(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    info = {**SGLANG, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001}
    server, router = stand_in("prefill", reports({"/server_info": info})), make_router(splitwise=True)
    with run_sidecar(router.url, server.port):
        wait_until(lambda: len(list(router.app.registry)) == 1, "the registration")
    (instance,) = router.app.registry
    assert (instance.role, instance.registration.bootstrap_port) == (Role.PREFILL, 9001)


def test_a_role_that_differs_from_the_sglang_servers_is_reported(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    info = {**SGLANG, "disaggregation_mode": "decode"}
    server, router = stand_in("decode", reports({"/server_info": info})), make_router(splitwise=True)
    with run_sidecar(router.url, server.port, "--role", "prefill") as sidecar:
        message = "reports that it is a decode instance, but --role is prefill"
        sidecar.wait_for(lambda: message in sidecar.output, "the message")
    assert list(router.app.registry) == []


def test_a_server_that_requires_a_key_needs_the_flag_engine(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    server, router = stand_in("mixed", reports({"/server_info": 401, "/get_server_info": 401})), make_router()
    server.models_status = 401
    with run_sidecar(router.url, server.port) as sidecar:
        sidecar.wait_for(lambda: "name the engine with --engine" in sidecar.output, "the message")
        assert list(router.app.registry) == []
    with run_sidecar(router.url, server.port, "--engine", "sglang"):
        wait_until(lambda: len(list(router.app.registry)) == 1, "the registration")


def test_an_operator_can_set_the_engine(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    server, router = stand_in("mixed", reports(VERSION)), make_router()
    server.owner = "sglang"
    flags = ("--engine", "vllm", "--kv-connector", "mooncake", "--bootstrap-port", "9001")
    with run_sidecar(router.url, server.port, *flags):
        wait_until(lambda: len(list(router.app.registry)) == 1, "the registration")
        (instance,) = router.app.registry
        registered = instance.registration
        fields = (registered.engine.value, registered.kv_connector.value, registered.bootstrap_port)
        assert fields == ("vllm", "mooncake", 9001)
    assert server.received == []  # the sidecar did not ask for the engine


def test_the_registration_has_the_endpoint_of_kv_events(
    stand_in: Callable[..., StandIn],
    make_router: Callable[..., RouterUnderTest],
    run_sidecar: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, router = stand_in(), make_router()
    flags = ("--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay-endpoint", "tcp://10.0.0.1:5558")
    with run_sidecar(router.url, server.port, "--engine", "vllm", *flags, "--kv-events-topic", "kv"):
        wait_until(lambda: len(list(router.app.registry)) == 1, "the registration")
        (instance,) = router.app.registry
        expected = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://10.0.0.1:5558", "topic": "kv"}
        assert instance.registration.kv_events == expected
    line = ["--router", router.url, "--port", "1"]
    assert main([*line, "--kv-events-topic", "kv"]) == 2
    assert "--kv-events-topic has no effect without --kv-events-endpoint; add it" in capsys.readouterr().err
    assert main([*line, "--kv-events-endpoint", "5557"]) == 2
    assert "'5557' is not tcp://HOST:PORT, such as tcp://*:5557" in capsys.readouterr().err


def test_heartbeats_continue_until_the_sidecar_ends(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    server, router = stand_in(), make_router()
    with run_sidecar(router.url, server.port, "--host", "127.0.0.1") as sidecar:
        wait_until(lambda: len(list(router.app.registry)) == 1, "the registration")
        (instance,) = router.app.registry
        first = instance.last_registered
        wait_until(lambda: instance.last_registered > first, "another heartbeat")
        sidecar.stop()
        assert sidecar.exit_code == 0
        assert sidecar.output.count("registered at") == 1


def test_an_unhealthy_server_is_registered_when_it_is_healthy(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    server, router = stand_in(), make_router()
    server.health = 503
    with run_sidecar(router.url, server.port) as sidecar:
        sidecar.wait_for(lambda: "answers /health with 503" in sidecar.output, "the message")
        assert list(router.app.registry) == []
        server.health = 200
        wait_until(lambda: list(list_health(router).values()) == [True], "the registration")


def test_the_sidecar_waits_for_a_server(make_router: Callable[..., RouterUnderTest], run_sidecar: Run) -> None:
    with run_sidecar(make_router().url, free_port()) as sidecar:
        sidecar.wait_for(lambda: "does not answer /health" in sidecar.output, "the message")
        assert sidecar.exit_code is None


def test_the_sidecar_waits_for_the_router(stand_in: Callable[..., StandIn], run_sidecar: Run) -> None:
    with run_sidecar(f"127.0.0.1:{free_port()}", stand_in().port) as sidecar:
        sidecar.wait_for(lambda: "does not answer" in sidecar.output, "the message")
        assert sidecar.exit_code is None


def test_a_router_with_an_admin_token_requires_it(
    stand_in: Callable[..., StandIn],
    make_router: Callable[..., RouterUnderTest],
    run_sidecar: Run,
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    server, router = stand_in(), make_router(admin_token_file=str(file))
    with run_sidecar(router.url, server.port) as sidecar:
        sidecar.wait_for(lambda: "refused the registration with status 401" in sidecar.output, "the message")
        assert list(router.app.registry) == []
    with run_sidecar(router.url, server.port, "--token-file", str(file)):
        wait_until(lambda: list(list_health(router).values()) == [True], "the registration")


def test_the_server_and_the_router_can_both_use_https(
    stand_in: Callable[..., StandIn],
    make_router: Callable[..., RouterUnderTest],
    run_sidecar: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_certificate(tmp_path)
    certfile, keyfile = str(made.certfile), str(made.keyfile)
    server = stand_in(tls=made.serve())
    router = make_router(ssl_certfile=certfile, ssl_keyfile=keyfile, instance_ca_file=certfile)
    plain = stand_in()
    for refused, flags in (
        (f"the server at {server.url}", ["--port", str(server.port), "--host", "https://127.0.0.1"]),
        (f"the router {router.url}", ["--port", str(plain.port)]),
    ):
        assert main(["--router", router.url, "--engine", "openai", *flags]) == 1  # without a retry
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"router.register: {refused} has a certificate of an unknown authority; ")
        assert "give the authority's certificate with --ca-file FILE" in error
    with run_sidecar(router.url, server.port, "--host", "https://127.0.0.1", "--ca-file", certfile):
        wait_until(lambda: list(list_health(router).values()) == [True], "the registration")
        assert router.chat().status_code == 200


def test_a_refusal_is_logged_once(
    stand_in: Callable[..., StandIn], make_router: Callable[..., RouterUnderTest], run_sidecar: Run
) -> None:
    server, router = stand_in(), make_router(splitwise=True)
    with run_sidecar(router.url, server.port) as sidecar:
        wait_until(lambda: server.probes >= 4, "several heartbeats")
        assert sidecar.output.count("refused the registration with status 400") == 1
        assert "mixed" in sidecar.output


def test_the_sidecar_imports_no_code_that_serves_requests() -> None:
    code = "import router.register, sys; print({name.split('.')[1] for name in sys.modules if name[:7] == 'router.'})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(loaded) == {"register", "fleet", "http", "settings", "policies"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--router", "nowhere"], "'nowhere' is not host:port"),
        (["--port", "0"], "'0' is not a port"),
        (
            ["--role", "both"],
            "argument --role: 'both' is not a role; it must be one of mixed, prefill, decode",
        ),
        (["--engine", "tgi"], "argument --engine: invalid choice: 'tgi'"),
        (["--kv-connector", "lmcache"], "argument --kv-connector: invalid choice: 'lmcache'"),
        (["--token-file", "/nowhere"], "--token-file /nowhere"),
        (["--ca-file", "/nowhere"], "--ca-file /nowhere: No such file or directory"),
        (["--rooter", "127.0.0.1:1"], "--rooter is not a flag of this program; did you mean --router?"),
    ],
)
def test_a_wrong_command_line_is_refused_with_one_sentence(flags: list[str], message: str) -> None:
    right = ["--router", "127.0.0.1:1", "--role", "mixed", "--port", "1"]
    command = [sys.executable, "-m", "router.register", *right, *flags]
    run = run_forked(command)
    assert run.returncode == 2
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_an_unknown_flag_is_reported_before_missing_flags() -> None:
    command = [sys.executable, "-m", "router.register", "--rooter", "127.0.0.1:1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "did you mean --router?" in run.stderr


def test_the_version_is_one_line() -> None:
    run = subprocess.run([sys.executable, "-m", "router.register", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()[0], run.stderr) == (0, "kvrouter", "")


def test_the_commands_of_the_readme_start_a_router_for_a_server(
    stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    """The commands of the section "Route" run on free ports, as programs of this environment."""
    section = README.read_text().partition("## Route\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    server, port = stand_in(), free_port()
    install, start, register, ask = (
        line.replace("9000", str(port)).replace("8000", str(server.port))
        for line in block.splitlines()
        if not line.startswith("#")
    )
    assert install == "pip install ."
    programs = {
        "kvrouter": [sys.executable, "-c", "from router.console import main; raise SystemExit(main())"],
        "python": [sys.executable],
    }
    router_command, register_command = (
        [*programs[name], *rest] for name, *rest in (shlex.split(line, comments=True) for line in (start, register))
    )
    with child(router_command, tmp_path / "router.log"), child(register_command, tmp_path / "register.log"):

        def answers() -> bool:
            asked = subprocess.run([*shlex.split(ask), "-sf"], cwd=ROOT, capture_output=True, timeout=60, check=False)
            return asked.returncode == 0 and b"choices" in asked.stdout

        wait_until(answers, "an answer to the curl command of the README")
