"""The scripts' check of their ports before they start processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port
from tests.support.processes import child
from tests.support.waiting import port_answers, wait_until

CHECK = Path(__file__).parents[2] / "examples" / "cache_storage" / "check_ports.py"


def check(*ports: int) -> str:
    """Return the message about ports that are in use."""
    command = [sys.executable, str(CHECK), *(f"router={port}" for port in ports)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    return ended.stderr.strip()


def test_the_message_names_the_process_that_uses_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        said = check(port)
    assert said.startswith(f"port {port}, wanted for router, is in use by process {os.getpid()} (")
    assert "pytest" in said


def test_the_message_about_another_run_of_a_script_says_how_to_end_it(tmp_path: Path) -> None:
    port = free_port()
    script = tmp_path / "run_pd_storage.sh"
    script.write_text(f"{sys.executable} -m http.server --bind 127.0.0.1 {port} &\nwait\n")
    with child(["bash", str(script)], tmp_path / "log") as running:
        wait_until(lambda: port_answers(port), "the server")
        said = check(port)
        assert (
            f"of run_pd_storage.sh (process {running.pid}): end that first, with Ctrl-C or kill {running.pid}" in said
        )


def test_every_used_port_is_named_with_the_process_that_a_killed_script_has_left() -> None:
    ports = [free_port(), free_port()]
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)],
            cwd=CHECK.parent,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for port in ports
    ]
    try:
        wait_until(lambda: all(map(port_answers, ports)), "the servers")
        said = check(*ports).splitlines()
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert len(said) == 2
    for line, port, server in zip(said, ports, servers, strict=True):
        assert line.startswith(f"port {port}, wanted for router, is in use by process {server.pid} (")
        assert line.endswith(f", which a killed script has probably left: end that first, with kill {server.pid}")
