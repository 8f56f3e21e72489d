"""The scripts in examples/cache_storage: their results, their messages about errors, and their cleanup."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.args import parse_args
from tests.examples.script import EXAMPLES, ROOT, complaint, loopback_only, running, script_environment
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(600)
needs_ports = pytest.mark.usefixtures("ports_free_again")
# The number of instances that each script starts.
SCRIPTS = {"run.sh": 2, "run_pd_storage.sh": 3, "run_03b_pd_storage.sh": 3, "run_ha.sh": 2, "run_router_ha.sh": 5}


@needs_ports
def test_two_instances_share_the_pool_with_only_the_loopback_interface(few_words: Path, tmp_path: Path) -> None:
    proxy = f"http://127.0.0.1:{free_port()}"  # a proxy for the internet, which cannot be reached
    (tmp_path / ".curlrc").write_text(f"proxy = {proxy}\n")
    variables = {"MODEL_NAME": str(few_words), "HOME": str(tmp_path), "http_proxy": proxy}
    with running("run.sh", under=loopback_only(), **variables) as script:
        assert script.end(400) == 0, script.output
    assert "verified: instance 1 read from the pool what instance 0 had computed" in script.output
    assert re.search(r"All \d+ keys in the pool are our backend's \(kv1-", script.output)
    assert script.left_behind() == []


@needs_ports
def test_ctrl_c_during_the_start_leaves_no_process() -> None:
    with running("run.sh") as script:
        script.wait_for("starting instance_1", deadline=60)
        script.interrupt()
        assert script.end(60) == 130
    assert script.left_behind() == []


@pytest.mark.parametrize("program", ["check_ports.py", "engine.make_model"])
def test_ctrl_c_while_a_program_of_the_script_runs_shows_none_of_its_output(tmp_path: Path, program: str) -> None:
    """Python's programs would show a traceback."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
        case "$*" in
            -c*) exit 1 ;;
            *{program}*) ;;
            *) exit 0 ;;
        esac
        trap 'echo Traceback; exit 1' INT
        echo "started {program}"
        while :; do sleep 0.1; done
        """
    )
    python.chmod(0o755)
    with running("run.sh", KVSTORE_PYTHON=str(python), ENGINE="kvstore") as script:
        script.wait_for(f"started {program}", deadline=60)
        script.interrupt()
        assert script.end(60) == 130
    assert "Traceback" not in script.output
    assert script.left_behind() == []


@needs_ports
def test_the_logs_of_another_running_example_are_not_removed() -> None:
    log, lock = EXAMPLES / "log_another" / "nohup", ROOT / ".cache" / "example.lock"
    for path in (log, lock):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = complaint("run.sh", KVSTORE_PYTHON=sys.executable, MODEL_NAME=str(EXAMPLES))
    assert told == "run.sh: another example runs in this checkout: end it first, with Ctrl-C\n"
    assert log.exists()
    shutil.rmtree(log.parent)


def test_what_is_started_does_not_inherit_the_lock(tmp_path: Path) -> None:
    commands = f"""
        source {EXAMPLES}/common.sh
        exec 9>lock
        EXPENDABLE=started
        start started ls -l /proc/self/fd
        wait "${{pids[started]}}"
        watched ls -l /proc/self/fd
    """
    ended = subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    for listed in (ended.stdout, (tmp_path / "log_started" / "nohup").read_text()):
        assert "/proc/" in listed
        assert "lock" not in listed


def test_a_process_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with running("run.sh", MODEL_NAME=str(tmp_path)) as script:
        assert script.end(60) == 1
    assert f"engine.api_server: --model '{tmp_path}' is not a checkpoint" in script.output
    assert "run.sh: instance_" in script.output.splitlines()[-1]
    assert script.left_behind() == []


@needs_ports
def test_a_used_port_is_named_with_its_purpose() -> None:
    with socket.create_server(("127.0.0.1", 52500)):
        said = complaint("run_pd_storage.sh")
    assert said.startswith(f"port 52500, wanted for decode, is in use by process {os.getpid()} (")
    assert said.endswith("): end that first, or take other ports\n")


@needs_ports
@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"MAX_MODEL_LEN": "8K"}, "MAX_MODEL_LEN=8K is not a number of tokens, such as 8192"),
        ({"MODEL_NAME": "/no/such/model"}, "MODEL_NAME=/no/such/model: there is no such folder; give "),
        ({"ENGINE": "fastdeply"}, "ENGINE=fastdeply is not known; use kvstore or fastdeploy"),
        ({"ROUTER": "nginx"}, "ROUTER=nginx is not known; use kvstore or fastdeploy"),
    ],
)
def test_a_wrong_variable_is_refused_in_one_sentence(environment: dict[str, str], sentence: str) -> None:
    said = complaint("run_pd_storage.sh", **environment)
    assert said.startswith(f"run_pd_storage.sh: {sentence}")
    assert said.count("\n") == 1


@needs_ports
def test_cheap_checks_come_before_the_check_of_the_ports() -> None:
    with socket.create_server(("127.0.0.1", 52500)):
        said = complaint("run_pd_storage.sh", MODEL_NAME="/no/such/model")
    assert "there is no such folder" in said


def test_a_wrong_argument_is_refused_in_one_sentence() -> None:
    assert (
        complaint("run.sh", "--kep")
        == "run.sh: unknown argument '--kep'; there are --keep, --dashboard and --dry-run\n"
    )


@pytest.mark.parametrize("script", [*SCRIPTS, "../retrieval/run.sh"])
def test_a_script_that_was_started_with_sh_runs_in_bash(script: str) -> None:
    ended = subprocess.run(["sh", EXAMPLES / script, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: run")


# Dry runs.


class Line:
    """A command of a dry run, with the variables before it."""

    def __init__(self, line: str) -> None:
        self.words = shlex.split(line)
        self.environment = {}
        while "=" in self.words[0]:
            name, _, self.environment[name] = self.words.pop(0).partition("=")
        if self.words[0] == "env":
            del self.words[0]
            while "=" in self.words[0]:
                name, _, self.environment[name] = self.words.pop(0).partition("=")

    @property
    def flags(self) -> list[str]:
        """The arguments after ``python -m MODULE``."""
        return self.words[self.words.index("-m") + 2 :]


def dry_run(script: str | Path, *arguments: str, **environment: str) -> list[Line]:
    ended = subprocess.run(
        ["bash", EXAMPLES / script, "--dry-run", *arguments],
        env=script_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line and not line.startswith("#")]
    assert lines.pop(0).startswith("cd ")
    return [Line(line) for line in lines]


def instances(lines: list[Line], module: str) -> list[Line]:
    return [line for line in lines if module in line.words]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_flags_that_our_engine_accepts(script: str) -> None:
    lines = dry_run(script, ENGINE="kvstore")
    started = instances(lines, "engine.api_server")
    assert len(started) == SCRIPTS[script]
    for line in started:
        args = parse_args(line.flags, line.environment)
        assert args.kvcache_storage_backend == (None if args.port == 52600 else "mooncake")
        assert str(args.log_dir).startswith("log_")
    assert any("mooncake_master" in line.words[0] for line in lines)
    assert any("FD_PLUGINS" in line.environment for line in lines) is False


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_dashboard_gets_the_addresses_of_the_router_and_all_masters(script: str) -> None:
    lines = dry_run(script, "--dashboard", ENGINE="kvstore")
    (dashboard,) = (line.words[1:] for line in lines if "dashboard" in line.words)
    (first_router, *_) = instances(lines, "router.launch")
    assert dashboard[: dashboard.index("--port")] == ["dashboard", "--router", f"127.0.0.1:{port_of(first_router)}"]
    pools = [dashboard[number + 1] for number, word in enumerate(dashboard) if word == "--pool"]
    metrics = [word for line in lines for word in line.words if word.startswith("--metrics_port=")]
    assert pools == [f"127.0.0.1:{word.partition('=')[2]}" for word in metrics]
    for line in instances(lines, "engine.api_server"):
        assert "--router" in line.words or "--no-enable-prefix-caching" in line.words


def port_of(line: Line) -> str:
    return line.words[line.words.index("--port") + 1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_with_fastdeploy_uses_our_backend(script: str, tmp_path: Path) -> None:
    lines = dry_run(script, ENGINE="fastdeploy", FD_MODEL_CACHE=str(tmp_path))
    started = instances(lines, "fastdeploy.entrypoints.openai.api_server")
    assert len(started) == SCRIPTS[script]
    for line in started:
        assert line.environment["FD_PLUGINS"] == "kvstore"
        folder = line.flags[line.flags.index("--model") + 1]
        assert folder == f"{tmp_path}/PaddlePaddle/ERNIE-4.5-0.3B-Paddle"
    assert all("engine.api_server" not in line.words for line in lines)


def test_plugins_of_the_user_remain() -> None:
    lines = dry_run("run.sh", ENGINE="fastdeploy", FD_PLUGINS="mine")
    assert {line.environment["FD_PLUGINS"] for line in lines} == {"mine,kvstore"}


@pytest.mark.parametrize("engine", ["kvstore", "fastdeploy"])
def test_a_dry_run_needs_no_setup_and_no_free_port_and_writes_no_files(engine: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples" / "cache_storage", ignore=shutil.ignore_patterns("log_*"))
    before = sorted(tmp_path.rglob("*"))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # the port is in use already
            taken.bind(("127.0.0.1", 15001))
        for script in SCRIPTS:
            assert dry_run(tmp_path / "examples" / "cache_storage" / script, ENGINE=engine)
    assert sorted(tmp_path.rglob("*")) == before


def with_fake_fastdeploy(folder: Path) -> dict[str, str]:
    """Return an environment in which a fake ``fastdeploy`` can be imported, but not our packages."""
    (folder / "fastdeploy").mkdir()
    (folder / "fastdeploy" / "__init__.py").touch()
    return {"PYTHONPATH": str(folder)}


def has_no_fastdeploy() -> bool:
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('fastdeploy') is not None)"
    return all(
        subprocess.run([python, "-c", look], check=False).returncode == 0 for python in ("python3", sys.executable)
    )


@pytest.mark.skipif(not has_no_fastdeploy(), reason="FastDeploy is installed here")
def test_without_fastdeploy_one_sentence_says_how_to_install_it() -> None:
    said = complaint("run_pd_storage.sh", ENGINE="fastdeploy")
    assert said.count("\n") == 1
    assert "no python here can import fastdeploy, which is not on PyPI" in said
    assert "pip install fastdeploy-gpu -i https://www.paddlepaddle.org.cn/packages/stable/" in said


def test_for_a_fastdeploy_without_our_backend_the_message_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())  # without our packages
    said = complaint(
        "run.sh", ENGINE="fastdeploy", PATH=f"{tmp_path}/bin:{os.environ['PATH']}", **with_fake_fastdeploy(tmp_path)
    )
    assert said.startswith(
        "run.sh: ENGINE=fastdeploy: the environment of FastDeploy lacks our backend; install it with: "
    )
    assert said.count("\n") == 1


# The model, and the maximum length.


def checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def find_values(lines: list[Line], flag: str) -> set[str]:
    return {line.flags[line.flags.index(flag) + 1] for line in instances(lines, "engine.api_server")}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, "4096"),
        ({"max_position_embeddings": 131072}, "32768"),
        ({"text_config": {"max_position_embeddings": 8192}}, "8192"),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            "4096",
        ),
        ({}, "32768"),
    ],
    ids=["shorter", "longer", "with a vision part", "longrope", "not said"],
)
def test_the_length_is_that_of_the_checkpoint(config: dict[str, object], length: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", **config)
    assert find_values(dry_run("run.sh", ENGINE="kvstore", MODEL_NAME=str(folder)), "--max-model-len") == {length}


def test_the_length_can_be_set(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", max_position_embeddings=131072)
    lines = dry_run("run_ha.sh", ENGINE="kvstore", MODEL_NAME=str(folder), MAX_MODEL_LEN="65536")
    assert find_values(lines, "--max-model-len") == {"65536"}


def test_the_processes_get_the_folder_of_a_model_from_a_hub(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "Qwen" / "Small", max_position_embeddings=4096)
    lines = dry_run("run.sh", ENGINE="kvstore", MODEL_NAME="Qwen/Small", FD_MODEL_CACHE=str(tmp_path))
    assert find_values(lines, "--model") == {str(folder)}
    assert find_values(lines, "--max-model-len") == {"4096"}


def test_a_missing_model_of_a_hub_is_refused_in_one_sentence() -> None:
    said = complaint("run.sh", "--dry-run", ENGINE="kvstore", MODEL_NAME="Nobody/Has-This-0.5B")
    assert said.startswith("MODEL_NAME=Nobody/Has-This-0.5B: model 'Nobody/Has-This-0.5B' is not a folder on this")
    assert said.count("\n") == 1
