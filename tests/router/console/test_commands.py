"""kvrouter: starts the router or, with a command, a program for operators."""

from __future__ import annotations

import importlib
import re
import subprocess

import pytest

from router.console.commands import COMMANDS, main


def test_without_a_command_kvrouter_takes_the_routers_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prot", "1"]) == 2
    assert capsys.readouterr().err == "router: --prot is not a flag of this program; did you mean --port?\n"


def test_the_help_lists_the_commands_and_the_routers_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +drain +stops new requests to instances", printed, re.MULTILINE)
    assert "--splitwise" in printed


def test_the_error_for_a_mistyped_command_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drian", "127.0.0.1:1"]) == 2
    message = "kvrouter: drian is not a command; did you mean drain?; without a command, kvrouter starts the router\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_gets_the_arguments_after_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: kvrouter {command}")
    assert (importlib.import_module(COMMANDS[command]).__doc__ or "").startswith(f"kvrouter {command}: ")


def complete(script: str, *words: str) -> list[str]:
    """Return bash's completions of the last word."""
    program = f"""{script}
COMP_WORDS=({" ".join(words)}) COMP_CWORD={len(words) - 1}
_shtab_{words[0]} {words[0]} "{words[-1]}" "{words[-2]}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return subprocess.run(["bash"], input=program, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "kvrouter", "d") == ["dashboard", "drain"]
    assert complete(script, "kvrouter", "--splitw") == ["--splitwise"]
    assert complete(script, "kvrouter", "top", "--in") == ["--interval"]
    assert "memory" in complete(script, "kvrouter", "top", "--sort", "''")


def test_the_completion_of_zsh_describes_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion=zsh"]) == 0
    assert "top:'shows the state of the router and its instances in a terminal" in capsys.readouterr().out


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "fish"]) == 2
    assert capsys.readouterr().err == "kvrouter: --print-completion must be followed by bash or zsh\n"
