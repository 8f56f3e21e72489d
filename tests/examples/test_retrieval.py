"""examples/retrieval: its messages about errors before it trains a model or starts processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.examples.script import ROOT

FOLDER = ROOT / "examples" / "retrieval"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_help_starts_nothing(tmp_path: Path) -> None:
    ended = run(FOLDER / "run.sh", "--help", OUTPUT=str(tmp_path / "output"))
    assert (ended.returncode, ended.stdout[:13]) == (0, "usage: run.sh")
    assert not (tmp_path / "output").exists()


def test_an_unknown_argument_is_refused_in_one_sentence() -> None:
    ended = run(FOLDER / "run.sh", "--bogus")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("run.sh: unknown argument '--bogus'; usage: run.sh")


def test_another_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("theirs")
    ended = run(sys.executable, FOLDER / "train_needle.py", "--output", tmp_path)
    assert (ended.returncode, "exists already; give a new folder" in ended.stderr) == (2, True)


def test_a_used_port_is_named_before_the_training(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run(FOLDER / "run.sh", OUTPUT=str(tmp_path / "output"), SPARSE_PORT=str(port))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"port {port}, wanted for the sparse instance, is in use by process {os.getpid()} (")
    assert not (tmp_path / "output").exists()


def test_a_process_that_has_ended_gets_no_signal(tmp_path: Path) -> None:
    """Another process may have its number later: the training takes minutes."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "started $$"\n[[ $1 != *train_needle.py ]]\n')
    python.chmod(0o755)
    shown = {"BASH_FUNC_kill%%": '() { echo "kill $*"; }'}  # bash calls this function instead of its own command
    ended = run(FOLDER / "run.sh", PYTHON=str(python), OUTPUT=str(tmp_path / "output"), **shown)
    words = [line.split() for line in ended.stdout.splitlines()]
    (_, training), killed = ([pid for word, pid in words if word == verb] for verb in ("started", "kill"))
    assert killed == [training]
