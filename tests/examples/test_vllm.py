"""examples/vllm: its message without vLLM. Its README describes runs with vLLM."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.script import ROOT


@pytest.mark.parametrize("script", ["run.py", "run_pd.py", "run_kills.py"])
def test_without_vllm_one_sentence_says_how_to_install_it(script: str) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "vllm" / script],
        # The master that starts first answers without the proxy that a user has for the internet.
        env={**os.environ, "VLLM": "/nonexistent", "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("NOT VERIFIED: VLLM=/nonexistent: there is no such program; ")
    assert ended.stderr.count("\n") == 1


def test_ctrl_c_while_modules_are_loaded_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "make_model.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "vllm" / "run.py"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_a_run_whose_logs_another_run_writes_is_refused() -> None:
    examples = ROOT / "examples" / "vllm"
    folder = examples / "log_of_a_test"
    program = f"import sys; sys.path.insert(0, {str(examples)!r}); from cluster import scratch\n"
    program += "with scratch('of_a_test') as folder: print(list(folder.iterdir()))"

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    folder.mkdir(exist_ok=True)
    (folder / "instance").mkdir(exist_ok=True)
    (folder / "router.log").write_text("of the first run")
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refused = run()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"NOT VERIFIED: another run writes its logs to {folder}: end it first, with Ctrl-C\n"
    assert (folder / "router.log").exists()
    os.close(held)
    assert run().stdout == "[]\n"
    folder.rmdir()


def test_an_interrupted_start_of_the_master_leaves_no_process(tmp_path: Path) -> None:
    code = (
        "import pathlib, cluster\n"
        "def interrupt(process, url):\n"
        "    print(process._process.pid, flush=True)\n"
        "    raise KeyboardInterrupt\n"
        "cluster.Process.wait_ready = interrupt\n"
        f"with cluster.Cluster(pathlib.Path({str(tmp_path)!r}), pathlib.Path()):\n"
        "    pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'examples' / 'vllm'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGINT
    assert not Path(f"/proc/{int(ended.stdout)}").exists()
