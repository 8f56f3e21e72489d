"""Checks of our command lines in manifests, units and pages, with the parsers of the programs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

from engine.args import parse_args
from kvstore_backend.cli import commands
from kvstore_backend.cli import main as run_kvstore
from kvstore_backend.config import load_config
from router.console import replay
from router.console.client import RouterClient
from router.console.commands import COMMANDS
from router.console.commands import main as run_kvrouter
from router.settings import SettingsError, load_settings

__all__ = ["check_command", "expand_variables"]


def check_command(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise an error if the program in ``argv`` would refuse its arguments or the environment."""
    program, *arguments = argv
    program = program.rpartition("/")[2]
    if re.fullmatch(r"python3?", program):
        assert arguments[0] == "-m", f"{argv}: no module is named"
        _, program, *arguments = arguments
    _CHECKS[program](arguments, environ)


def expand_variables(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` and ``${NAME}`` as Kubernetes and systemd do.

    Raises:
        KeyError: a variable is not in ``values``.
    """
    return re.sub(r"\$(?:\((\w+)\)|\{(\w+)\})", lambda found: values[found[1] or found[2]], text)


def _check_router(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    if arguments[:1] == ["epp"]:
        arguments = arguments[1:]  # the next word; the rest are flags of the router
    if arguments and arguments[0] in COMMANDS:
        return _check_console(arguments)
    settings = load_settings(list(arguments), environ)
    assert not settings.without_effect, settings.without_effect
    return None


def _check_console(arguments: Sequence[str]) -> None:
    """Check a command of kvrouter. Each first parses its flags, and then makes a client, or reads files."""
    if arguments[0] == "replay":
        replay.make_parser().parse_args(arguments[1:])
        return
    stopped = SettingsError("the flags are read")
    output = io.StringIO()
    from_flags = mock.patch.object(RouterClient, "from_flags", side_effect=stopped)
    with from_flags as called, contextlib.redirect_stderr(output):
        run_kvrouter(arguments)
    assert called.called, f"kvrouter {' '.join(arguments)}: {output.getvalue()}"


def _check_store(arguments: Sequence[str], _: Mapping[str, str]) -> None:
    if arguments[0] != "master":
        return _check_store_command(arguments)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        assert run_kvstore([*arguments, "--print"]) == 0, output.getvalue()
    return None


def _check_store_command(arguments: Sequence[str]) -> None:
    """Check a command of kvstore. Each has a function ``run`` that gets the flags."""
    if arguments == ["--version"]:
        return
    command = dataclasses.replace(commands.COMMANDS[arguments[0]], run=lambda _: 0)
    with mock.patch.dict(commands.COMMANDS, {arguments[0]: command}):
        assert run_kvstore(arguments) == 0


def _check_engine(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    args = parse_args(arguments, environ)
    if args.kvcache_storage_backend:
        # Only the machine that runs the command knows whether it has RDMA cards.
        with mock.patch("kvstore_backend.config.values.list_rdma_devices", return_value=["mlx5_0"]):
            load_config(args.kvcache_storage_backend, environ=environ)


def _check_make_model(arguments: Sequence[str], _: Mapping[str, str]) -> None:
    from engine import make_model

    with mock.patch.object(make_model, "make_model"), contextlib.redirect_stdout(io.StringIO()):
        assert make_model.main(arguments) == 0


_CHECKS: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], None]] = {
    "kvrouter": _check_router,
    "router.launch": _check_router,
    "kvstore": _check_store,
    "engine.api_server": _check_engine,
    "engine.make_model": _check_make_model,
}
