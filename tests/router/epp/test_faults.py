"""``kvrouter epp`` as a process that dies or hangs, with a real Envoy that fails closed or open."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from router.console import main
from router.launch.program import NO_GRPC
from tests.router.conftest import MakeStandIn
from tests.router.stand_in import Behaviour, streams_until
from tests.support import plain_http
from tests.support.envoy import Envoy, make_config, running_envoy
from tests.support.ports import free_port
from tests.support.processes import Child, child
from tests.support.waiting import port_answers, wait_until

pytest.importorskip("grpc", reason="the extra epp is not installed")

EPP = [str(Path(sys.executable).with_name("kvrouter")), "epp", "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
REFUSED = "router: port {} of 127.0.0.1 is already in use; choose another with --epp-port\n"
DUPLEX: dict[str, Any] = {}
BUFFERED: dict[str, Any] = {"processing_mode": {"request_body_mode": "BUFFERED"}}


class EnvoyWithPicker(Envoy):
    """An Envoy, and its picker in another process."""

    picker: Child
    picker_url: str

    def chat(self) -> httpx.Response:
        url = f"{self.url}/v1/chat/completions"
        return httpx.post(url, json={"messages": []}, trust_env=False, timeout=15)


@pytest.fixture
def start(stand_in: MakeStandIn, tmp_path: Path) -> Iterator[Callable[..., EnvoyWithPicker]]:
    """A function that starts instances, ``kvrouter epp`` and Envoy: ``start(ext_proc, *flags, behave=behaviour)``."""
    with contextlib.ExitStack() as started:

        def begin(ext_proc: dict[str, Any], *flags: str, behave: Behaviour | None = None) -> EnvoyWithPicker:
            instances = [stand_in("mixed", behave), stand_in("mixed", behave)]
            port, picker_port = free_port(), free_port()
            argv = [*EPP, "--epp-port", str(picker_port), *flags]
            picker = started.enter_context(child(argv, tmp_path / "picker.log"))
            picker.wait_for(lambda: "picker listens at port" in picker.output, "listening")
            picker.wait_for(lambda: "router listens at" in picker.output, "listening")
            found = re.search(r"router listens at (\S+:\d+)", picker.output)
            assert found is not None
            for instance in instances:
                wait_until(lambda: instance.register(found[1]).status_code == 200, "a registration")  # noqa: B023
            config = make_config(port, picker_port, [instance.port for instance in instances], **ext_proc)
            envoy = started.enter_context(running_envoy(tmp_path, config, port))
            gateway = EnvoyWithPicker(envoy.port, envoy.process)
            gateway.picker, gateway.picker_url = picker, found[1]
            return gateway

        yield begin


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_fails_closed_refuses_requests_without_its_picker(
    start: Callable[..., EnvoyWithPicker], mode: dict[str, Any], fault: signal.Signals
) -> None:
    gateway = start({**mode, "failure_mode_allow": False})
    wait_until(lambda: gateway.chat().headers.get("x-router-mixed"), "a placement")
    gateway.picker.signal(fault)
    assert [gateway.chat().status_code for _ in range(2)] == [503, 503]


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_fails_open_chooses_instances_without_its_picker(
    start: Callable[..., EnvoyWithPicker], mode: dict[str, Any], fault: signal.Signals
) -> None:
    gateway = start({**mode, "failure_mode_allow": True})
    wait_until(lambda: gateway.chat().headers.get("x-router-mixed"), "a placement")
    gateway.picker.signal(fault)
    # Envoy does not store streamed bodies: the first requests fail, until it has detected the picker's loss.
    assert {gateway.chat().status_code for _ in range(2)} <= ({200} if mode is BUFFERED else {200, 503})
    wait_until(lambda: gateway.chat().status_code == 200, "a response without the picker")
    assert "x-router-mixed" not in gateway.chat().headers


def test_a_picker_of_two_workers_chooses_instances_until_sigterm(start: Callable[..., EnvoyWithPicker]) -> None:
    gateway = start({}, "--workers", "2")
    wait_until(lambda: gateway.chat().headers.get("x-router-mixed"), "a placement")
    assert {gateway.chat().status_code for _ in range(4)} == {200}
    gateway.picker.signal(signal.SIGTERM)
    assert gateway.picker.wait() == 0


def test_a_stopping_picker_accepts_no_connections_while_a_gateways_request_ends(
    start: Callable[..., EnvoyWithPicker],
) -> None:
    may_end = threading.Event()
    gateway = start({}, behave=streams_until(may_end))
    with plain_http.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json={"messages": [], "stream": True}
    ) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        gateway.picker.signal(signal.SIGTERM)
        wait_until(lambda: not port_answers(int(gateway.picker_url.rpartition(":")[2])), "the HTTP port to close")
        may_end.set()
        assert b"".join(pieces) == b"data: [DONE]\n\n"
    assert gateway.picker.wait() == 0


def test_the_error_without_grpc_names_the_package_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert main(["epp"]) == 2
    assert capsys.readouterr().err == f"router: {NO_GRPC}\n"


def test_a_port_in_use_is_refused_with_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert try_to_start(other.getsockname()[1]) == (2, REFUSED.format(other.getsockname()[1]))


@pytest.mark.parametrize("first", ["1", "2"])
@pytest.mark.parametrize("second", ["1", "2"])
def test_two_pickers_do_not_share_a_port(tmp_path: Path, first: str, second: str) -> None:
    port = free_port()
    with child([*EPP, "--epp-port", str(port), "--workers", first], tmp_path / "picker.log") as picker:
        picker.wait_for(lambda: picker.output.count("picker listens at port") >= 1, "listening")
        assert try_to_start(port, "--workers", second) == (2, REFUSED.format(port))
        picker.signal(signal.SIGTERM)
        assert picker.wait() == 0


def try_to_start(port: int, *flags: str) -> tuple[int, str]:
    """Start a picker that cannot use its port; return its status and its message."""
    argv = [*EPP, "--epp-port", str(port), *flags]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr
