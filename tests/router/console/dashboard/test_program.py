"""kvrouter dashboard: its command line, and its errors at the start."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from router.console.dashboard import main


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "x"], "argument --port: 'x' is not a port, a number from 0 to 65535"),
        (["--pool", "15003"], "argument --pool: '15003' is not host:port, such as 127.0.0.1:15003"),
        (["--interval", "0"], "argument --interval: '0' is not a number of seconds from 0.1 to 60"),
        (["--rooter", "a:1"], "--rooter is not a flag of this program; did you mean --router?"),
    ],
    ids=["port", "pool", "interval", "flag"],
)
def test_an_error_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"kvrouter dashboard: {sentence}\n"


def test_a_missing_token_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--token-file", str(tmp_path / "none")]) == 2
    assert f"--token-file {tmp_path / 'none'}" in capsys.readouterr().err


def test_the_error_without_nicegui_has_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main([]) == 1
    assert (
        "NiceGUI, which is not installed: pip install '/path/to/this/repository[dashboard]'" in capsys.readouterr().err
    )


@pytest.mark.skipif(importlib.util.find_spec("nicegui") is None, reason="NiceGUI is not installed")
def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    message = f"kvrouter dashboard: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"
    assert capsys.readouterr().err == message
