"""Our programs accept the commands in the scripts of FastDeploy's examples, or refuse them with a helpful sentence.

The commands are from release 2.6 and from the newest files, with the scripts' variables replaced. The table in
docs/migrate.md has the results of real runs. The commands of ``multi_api_server`` (``start_v1_dp2.sh``) are missing,
because we do not have this program.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.args import parse_args
from kvstore_backend import ConfigError
from kvstore_backend.cli import master
from kvstore_backend.config import MooncakeSettings, read_config
from router.settings import SettingsError, load_settings
from tests.examples.script import ROOT

PAGE = (ROOT / "docs" / "migrate.md").read_text()
API_SERVER = "fastdeploy.entrypoints.openai.api_server"
ERNIE = "PaddlePaddle/ERNIE-4.5-0.3B-Paddle"
POOLED = f"{API_SERVER} --model {{model}} --port {{port}} --max-model-len 32768 --max-num-seqs 32"
MIXED = (
    f"{API_SERVER} --model {ERNIE} --port {{0}}00 --metrics-port {{0}}01 --engine-worker-queue-port {{0}}02 "
    "--cache-queue-port {0}03 --max-model-len 32768 --router 0.0.0.0:52600"
)
PAIRED = f'{API_SERVER} --model {ERNIE} --port {{port}} --splitwise-role "{{role}}" --router "0.0.0.0:52700"'
MASTER = (
    "mooncake_master --port=15001 --enable_http_metadata_server=true --http_metadata_server_host=0.0.0.0 "
    "--http_metadata_server_port=15002"
)
HA_MASTER = "--cluster_id mooncake_cluster --rpc_address 127.0.0.1 --rpc_port 808{0} --metrics_port=909{0}"
ETCD = "http://127.0.0.1:12379;http://127.0.0.1:22379;http://127.0.0.1:32379"


@dataclass(frozen=True)
class Line:
    """A command of a script, and the end of the sentence that refuses it; empty if it works."""

    script: str
    command: str
    refusal: str = ""


def pair(script: str, more: str = "", refusal: str = "") -> list[Line]:
    """Return the commands of the prefill and the decode instance in a script."""
    lines = [PAIRED.format(port=port, role=role) for port, role in ((52400, "prefill"), (52500, "decode"))]
    return [Line(script, f"{line}{more}", refusal) for line in lines]


def pooled(script: str, model: str) -> list[Line]:
    """Return the commands of two instances that share a pool."""
    lines = [POOLED.format(model=model, port=port) for port in (52700, 52800)]
    return [Line(script, f"{line} --kvcache-storage-backend mooncake") for line in lines]


PYTHON_ROUTER, GO_ROUTER = "fastdeploy.router.launch", "fd-router"
STORED = f"{POOLED.format(model=f'/work/models/{ERNIE}', port='{port}')} --splitwise-role {{role}}"
STORED += " --cache-transfer-protocol rdma --router 0.0.0.0:52700 --kvcache-storage-backend mooncake"
LINES = [
    Line("cache_storage/run.sh", f"{MASTER} --metrics_port=15003"),
    *pooled("cache_storage/run.sh", ERNIE),
    *(
        Line(script, line)
        for script in ("cache_storage/run_03b_pd_storage.sh", "cache_storage/run_03b_pd.sh")
        for line in (
            MASTER,
            f"{PYTHON_ROUTER} --port 52700 --splitwise",
            STORED.format(port=52400, role="prefill"),
            STORED.format(port=52500, role="decode") + " --enable-output-caching",
        )
    ),
    *(
        Line("cache_storage/run_ha.sh", f"mooncake_master --enable_ha --etcd_endpoints '{ETCD}' {HA_MASTER.format(i)}")
        for i in (1, 2, 3)
    ),
    *pooled("cache_storage/run_ha.sh", "/workspace/models/Ernie-0.3B"),
    *(
        Line(
            "cache_storage/run_ha_redis.sh",
            "mooncake_master --enable_ha --ha_backend_type redis --ha_backend_connstring redis://127.0.0.1:6399 "
            + HA_MASTER.format(i),
        )
        for i in (1, 2, 3)
    ),
    *pooled("cache_storage/run_ha_redis.sh", "/workspace/models/Ernie-0.3B"),
    *(
        Line(script, line)
        for script, router in (
            ("router/start_mixed_python_router.sh", PYTHON_ROUTER),
            ("router/start_mixed_go_router.sh", GO_ROUTER),
            ("splitwise/start_mixed.sh", PYTHON_ROUTER),
        )
        for line in (f"{router} --port 52600", MIXED.format(524), MIXED.format(525))
    ),
    *(
        line
        for script, router in (
            ("router/start_pd_python_router.sh", PYTHON_ROUTER),
            ("router/start_pd_go_router.sh", GO_ROUTER),
            ("splitwise/start_v1_tp1.sh", PYTHON_ROUTER),
        )
        for line in (Line(script, f"{router} --port 52700 --splitwise"), *pair(script))
    ),
    Line("splitwise/start_v1_tp2.sh", f"{PYTHON_ROUTER} --port 52700 --splitwise"),
    *pair("splitwise/start_v1_tp2.sh", " --tensor-parallel-size 2", "this engine runs a model on one device"),
    Line("splitwise/start_v1_dp2.sh", f"{PYTHON_ROUTER} --port 8123 --splitwise"),
]
WITHOUT_COMMANDS = ("splitwise/stop.sh", "splitwise/test.sh")  # these only end processes, and send a request with curl
HA_FILES = {
    "ha_mooncake_config.json": "etcd://127.0.0.1:12379;127.0.0.1:22379;127.0.0.1:32379",
    "ha_redis_mooncake_config.json": "redis://127.0.0.1:6399",
}


def parse(command: str) -> str:
    """Parse a command with our program; return the sentence that refuses it, or an empty text."""
    program, *words = shlex.split(command)
    try:
        if program == API_SERVER:
            parse_args(words, {})
        elif program in (PYTHON_ROUTER, GO_ROUTER):
            load_settings(words, {})
        else:
            assert program == "mooncake_master"
            parse_master(words)
    except (ConfigError, SettingsError) as exc:
        return str(exc)
    return ""


def parse_master(words: list[str]) -> None:
    """Parse flags of ``mooncake_master`` as flags of ``kvstore master``."""
    parser = argparse.ArgumentParser()
    master.add_arguments(parser)
    arguments, native = parser.parse_known_args(words)
    arguments.native = native
    master.build_command(arguments)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.script)
def test_each_command_of_fastdeploys_scripts_is_accepted_or_refused_in_a_sentence(line: Line) -> None:
    sentence = parse(line.command)
    assert bool(sentence) == bool(line.refusal), sentence
    assert line.refusal in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("script", sorted({line.script for line in LINES} | set(WITHOUT_COMMANDS)))
def test_the_migration_page_has_a_row_for_each_script(script: str) -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and f"`{script}`" in row]
    assert len(rows) == 1


@pytest.mark.parametrize("name", HA_FILES)
def test_the_configuration_files_of_the_scripts_for_several_masters_are_accepted(name: str, tmp_path: Path) -> None:
    servers = HA_FILES[name]
    path = tmp_path / name
    addresses = {"metadata_server": servers, "master_server_addr": servers}
    others = {"global_segment_size": 1000000000, "local_buffer_size": 134217728, "protocol": "rdma", "rdma_devices": ""}
    path.write_text(json.dumps({**addresses, **others}))
    config = read_config(path, environ={"MOONCAKE_PROTOCOL": "tcp"})
    assert config is not None
    assert config.store == MooncakeSettings(servers, servers, protocol="tcp", global_segment_size=1000000000)
