"""kvrouter: the router, or with a command one of an operator's programs."""

from __future__ import annotations

import importlib

import pytest

from router.console.commands import COMMANDS, main


def test_without_a_command_it_is_the_router_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prot", "1"]) == 2
    assert capsys.readouterr().err == "router: --prot is not a flag of this program; did you mean --port?\n"


def test_a_mistyped_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drian", "127.0.0.1:1"]) == 2
    said = "kvrouter: drian is not a command; did you mean drain?; without one the router starts\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_takes_the_arguments_behind_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: kvrouter {command}")
    assert (importlib.import_module(COMMANDS[command]).__doc__ or "").startswith(f"kvrouter {command}: ")
