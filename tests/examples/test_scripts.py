"""examples/cache_storage, run for real: what they verify, what they say when something is wrong, what they leave."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from tests.examples.script import EXAMPLES, loopback_only, running, script_environment

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("free_ports")]


def test_two_instances_share_the_pool_with_no_interface_but_loopback(free_ports: None) -> None:
    with running("run.sh", under=loopback_only()) as script:
        assert script.end(400) == 0, script.output
    assert "verified: instance 1 read from the pool what instance 0 had computed" in script.output
    assert script.left_behind() == []


def test_ctrl_c_while_starting_leaves_nothing_behind() -> None:
    with running("run.sh") as script:
        script.wait_for("starting instance_1", deadline=60)
        script.interrupt()
        assert script.end(60) == 130
    assert script.left_behind() == []


def test_a_child_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with running("run.sh", MODEL_NAME=str(tmp_path)) as script:
        assert script.end(60) == 1
    assert f"engine.api_server: --model '{tmp_path}' is not a checkpoint" in script.output
    assert "run.sh: instance_" in script.output.splitlines()[-1]
    assert script.left_behind() == []


def complaint(name: str, *arguments: str, **environment: str) -> str:
    """What the script says on standard error when it refuses to start."""
    ended = subprocess.run(
        [EXAMPLES / name, *arguments],
        env=script_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stderr


def test_a_busy_port_is_named_with_what_it_was_for() -> None:
    with socket.create_server(("127.0.0.1", 52500)):
        said = complaint("run_pd_storage.sh")
    assert said == "port 52500, wanted for decode, is in use; ss -tanp shows by what\n"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"MODEL_NAME": "/no/such/model"}, "MODEL_NAME=/no/such/model: there is no such folder; give "),
        ({"ENGINE": "fastdeply"}, "ENGINE=fastdeply is not known; use kvstore or fastdeploy"),
        ({"ROUTER": "nginx"}, "ROUTER=nginx is not known; use kvstore or fastdeploy"),
    ],
)
def test_a_wrong_choice_is_said_in_one_sentence(environment: dict[str, str], sentence: str) -> None:
    said = complaint("run_pd_storage.sh", **environment)
    assert said.startswith(f"run_pd_storage.sh: {sentence}")
    assert said.count("\n") == 1


def test_what_costs_nothing_to_check_is_checked_before_the_ports() -> None:
    with socket.create_server(("127.0.0.1", 52500)):
        said = complaint("run_pd_storage.sh", MODEL_NAME="/no/such/model")
    assert "there is no such folder" in said


def test_a_wrong_argument_is_said_in_one_sentence() -> None:
    assert complaint("run.sh", "--kep") == "run.sh: unknown argument '--kep'; the only one is --keep\n"
