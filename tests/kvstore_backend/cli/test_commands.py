"""bench, stats and master, with real pools."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import prometheus_client
import pytest

from kvstore_backend.backend import ConfigError
from kvstore_backend.cli import bench, main, master
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import open_store
from kvstore_backend.stores.file import FileStore
from tests.kvstore_backend.cli.command import doctor, kvstore
from tests.kvstore_backend.cli.test_doctor import url
from tests.support import plain_http
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.peer import Peer
from tests.support.ports import free_ports
from tests.support.processes import child
from tests.support.waiting import wait_until

FIRST, SECOND = (Namespace(name, "float32", 64, 1, 1, 1, "bytes") for name in ("first", "second"))


def put(store: FileStore, keys: Sequence[str]) -> None:
    memory = Memory(b"block")
    assert all(store.put(keys, [memory.value] * len(keys)))


def blocks(namespace: Namespace, count: int) -> list[str]:
    return [namespace.key(bytes([number]) * 32) for number in range(count)]


def test_stats_count_a_folders_blocks_by_namespace(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1 << 20)
    put(store, [*blocks(FIRST, 3), *blocks(SECOND, 1), "somebody/else's"])
    store.close()
    figures = json.loads(kvstore("stats", "--json", f"file://{tmp_path}?size=1MiB").output)
    assert figures["keys_by_namespace"] == {FIRST.digest: 3, SECOND.digest: 1, "(not ours)": 1}
    assert (figures["keys"], figures["used_bytes"], figures["capacity_bytes"]) == (5, 25, 1 << 20)


@pytest.mark.parametrize("command", ["stats", "doctor"])
def test_a_block_that_is_evicted_during_a_listing_is_skipped(tmp_path: Path, command: str) -> None:
    store = FileStore(tmp_path, 1 << 20)
    put(store, blocks(FIRST, 3))
    store.close()
    block = next(tmp_path.glob("blocks/*/*"))
    block.unlink()
    block.symlink_to("nothing")  # stands in for a block that is listed, and evicted before it is read
    ended = kvstore(command, "--json", f"file://{tmp_path}?size=1MiB")
    assert ended.status == 0
    assert '"keys": 2' in ended.output or "has 10 bytes of" in ended.output


def test_stats_count_a_mooncake_pools_blocks_by_namespace(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        admin = master.metrics_url.split("/")[2]
        store = open_store(master.config())
        memory = Memory(b"block")
        keys = [*blocks(FIRST, 2), *blocks(SECOND, 1)]
        assert all(store.put(keys, [memory.value] * 3))
        ended = kvstore("stats", "--json", url(master), "--master-metrics", admin)
        table = kvstore("stats", url(master), "--master-metrics", admin)
        store.close()
    figures = json.loads(ended.output)
    assert figures["keys_by_namespace"] == {FIRST.digest: 2, SECOND.digest: 1}
    assert (figures["keys"], figures["used_bytes"], figures["clients"]) == (3, 15, 1)
    assert figures["capacity_bytes"] == 64 << 20
    assert f"{FIRST.digest}     2" in table.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stats", "file:///nowhere/pool"], "folder /nowhere/pool does not exist"),
        (["stats", "memory:"], "a memory pool belongs to one process"),
        (["stats", "mooncake://127.0.0.1:1?protocol=tcp"], "no Mooncake master answers at 127.0.0.1:1"),
        (
            ["stats", "--instances", "h:1", "pool.json"],
            "'pool.json', which is not HOST:PORT; write the configuration before",
        ),
        (["bench", "memory:", "--block-size", "big"], "--block-size is 'big'; a size is"),
        (["bench", "memory:", "--block-size", "100TB"], "which is more memory than this machine has"),
        (["bench", "memory:", "--blocks", "0"], "--block-size, --blocks and --batches must be at least 1"),
        (["bench", "memory:?size=1MiB", "--block-size", "1MiB"], "the pool may be too small"),
        (["bench", "memory:", "--warm-up", "-1"], "--warm-up is -1; it must not be negative"),
        (["bench"], "no pool is configured"),
        (
            ["master", "--eviction-ratio", "3", "--print"],
            "--eviction-ratio is 3.0; it must be a number between 0 and 1",
        ),
        (["master", "--port", "99999"], "--port is 99999; it must be from 1 to 65535"),
        (
            ["master", "--print", "--evction_ratio", "3"],
            "--evction_ratio is not a flag of kvstore master, nor of mooncake_",
        ),
        (["master", "--lease", "forever"], "--lease is 'forever'; it must be a whole number of ms, s, m or h"),
        (["master", "--rpc-threads=-1", "--print"], "--rpc-threads is -1; it must be at least 0"),
        (["master", "--snapshot-dir", "/dev/null", "--print"], "--snapshot-dir is '/dev/null', which is not a folder"),
        (["master", "--tenants", "/nowhere"], "--tenants is '/nowhere'; it must be a readable file with quotas"),
    ],
)
def test_arguments_that_cannot_be_used_get_one_sentence(arguments: list[str], sentence: str) -> None:
    ended = kvstore(*arguments)
    assert ended.status == 1
    assert ended.errors.startswith("kvstore: ")
    assert sentence in ended.errors
    assert ended.errors.count("\n") == 1


@pytest.mark.parametrize("page", ["/metrics", "/get_segments_detail"])
def test_an_incomplete_answer_of_a_master_causes_no_traceback(tmp_path: Path, page: str) -> None:
    with mooncake_master(tmp_path / "log") as master, _serve_without_page(master, page) as admin:
        for command in ("stats", "doctor"):
            ended = kvstore(command, url(master), "--master-metrics", admin)
            assert "Traceback" not in ended.errors
            assert ended.status == (1 if (command, page) == ("stats", "/metrics") else 0), ended.output


@contextlib.contextmanager
def _serve_without_page(master: MooncakeMaster, page: str) -> Iterator[str]:
    """Forward the master's pages except ``page``, as another version of it might; yield the address."""

    class Forwarder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            real = plain_http.get(f"http://{master.metrics_url.split('/')[2]}{self.path}")
            self.send_response(real.status_code)
            self.end_headers()
            self.wfile.write(b"{}" if self.path == page else real.content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Forwarder) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_stats_refuse_metrics_that_are_not_of_an_instance(tmp_path: Path) -> None:
    FileStore(tmp_path, 1 << 20).close()
    with prometheus_client.start_http_server(0, "127.0.0.1")[0] as server:
        address = f"127.0.0.1:{server.server_port}"
        ended = kvstore("stats", f"file://{tmp_path}?size=1MiB", "--instances", address)
        server.shutdown()
    assert ended.status == 1
    assert ended.errors.startswith(f"kvstore: the server at {address} is not an instance with a pool")


def test_stats_with_watch_show_how_fast_figures_grow(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "pool", 1 << 20)
    put(store, blocks(FIRST, 3))
    command = [
        sys.executable,
        "-m",
        "kvstore_backend.cli",
        "stats",
        f"file://{tmp_path}/pool?size=1MiB",
        "--watch",
        "0.5",
    ]
    with child(command, tmp_path / "log") as watching:
        watching.wait_for(lambda: "a second" in watching.output, "a second reading", 60)
        put(store, blocks(SECOND, 2))
        grown = re.compile(r"^keys +5 +\+[\d.]+$", re.MULTILINE)
        watching.wait_for(lambda: grown.search(watching.output) is not None, "growth", 60)
        (tmp_path / "pool").rename(tmp_path / "gone")
        store.close()
        watching.wait_for(lambda: "the measurements are read again every 0.5 s" in watching.output, "a sentence", 60)
        watching.signal(signal.SIGINT)
        watching.wait()
    assert "Traceback" not in watching.output


def test_bench_measures_the_full_stack_and_the_bare_store(tmp_path: Path) -> None:
    arguments = ["--block-size", "4KiB", "--blocks", "4", "--batches", "2", "--json"]
    ended = kvstore("bench", f"file://{tmp_path}/pool?size=16MiB", *arguments)
    assert ended.status == 0, ended.errors
    rows = json.loads(ended.output)["rows"]
    assert {(row["operation"], row["through"]) for row in rows} == {
        (operation, through) for operation in ("put", "get", "exists") for through in ("bare store", "full stack")
    }
    assert all(0 < row["min_seconds"] <= row["median_seconds"] <= row["worst_seconds"] for row in rows)
    assert {row["batches"] for row in rows} == {2}


def test_bench_does_not_count_the_batches_that_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [100.0, 50.0, 1.0, 3.0, 2.0]
    readings = itertools.chain.from_iterable((0.0, duration) for duration in durations)
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    meter = bench._Meter(block_bytes=4096, blocks=1, batches=3, warm_up=2)
    row = meter._time_batches("put", "bare store", 4096, len, [[b"block"]] * 5)
    assert (row.batches, row.min_seconds, row.median_seconds, row.worst_seconds) == (3, 1.0, 2.0, 3.0)
    assert row.bytes_per_second == 4096 * 3 / 6


def test_bench_shows_minimum_median_and_maximum(tmp_path: Path) -> None:
    arguments = ["--block-size", "4KiB", "--blocks", "4", "--batches", "3", "--warm-up", "0"]
    lines = kvstore("bench", f"file://{tmp_path}/pool?size=16MiB", *arguments).output.splitlines()
    assert lines[0] == "3 batches of 4 blocks of 4 KiB; times are per batch"
    assert lines[1].split()[:6] == ["operation", "through", "GB/s", "min", "median", "max"]


def test_bench_leaves_nothing_in_a_mooncake_pool_of_another_client(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        other = open_store(master.config())
        arguments = ["--block-size", "64KiB", "--blocks", "4", "--batches", "2"]
        ended = kvstore("bench", url(master, global_segment_size=0), *arguments)
        keys = plain_http.get(master.metrics_url.replace("/metrics", "/get_all_keys")).text
        other.close()
    assert ended.status == 0, ended.errors
    assert "full stack" in ended.output
    assert keys.split() == []


def test_bench_leaves_nothing_in_a_folder_that_is_too_small(tmp_path: Path) -> None:
    ended = kvstore("bench", f"file://{tmp_path}/pool?size=1MiB", "--block-size", "64KiB", "--blocks", "8")
    assert "the pool may be too small" in ended.errors
    assert list_blocks(tmp_path) == []


def test_bench_leaves_nothing_in_a_folder_when_it_is_interrupted(tmp_path: Path) -> None:
    arguments = ["--block-size", "64KiB", "--blocks", "4", "--batches", "2000"]
    command = [sys.executable, "-m", "kvstore_backend.cli", "bench", f"file://{tmp_path}/pool?size=1GiB", *arguments]
    with child(command, tmp_path / "log") as bench:
        bench.wait_for(lambda: bool(list_blocks(tmp_path)), "storing")
        bench.signal(signal.SIGINT)
        bench.wait()
    assert list_blocks(tmp_path) == []


def list_blocks(tmp_path: Path) -> list[Path]:
    """List the blocks in the folder of a pool."""
    return list((tmp_path / "pool").glob("blocks/*/*.block"))


def test_master_starts_a_master_and_prints_the_settings_of_clients(tmp_path: Path) -> None:
    rpc, metadata, metrics = free_ports(3)
    ports = ["--port", str(rpc), "--metadata-port", str(metadata), "--metrics-port", str(metrics)]
    command = [sys.executable, "-m", "kvstore_backend.cli", "master", *ports, "--lease", "5s"]
    with child(command, tmp_path / "log") as master:

        def is_serving() -> bool:
            try:
                return bool(plain_http.get(f"http://127.0.0.1:{metrics}/health").json()["service_ready"])
            except httpx.HTTPError:
                return False

        master.wait_for(is_serving, "serving")
        lines = [line.removeprefix("export ") for line in master.output.splitlines() if line.startswith("export ")]
        environment = dict(line.split("=", 1) for line in lines)
        admin = f"127.0.0.1:{metrics}"
        diagnosis = doctor(
            "--master-metrics", admin, **environment, MOONCAKE_PROTOCOL="tcp", MOONCAKE_GLOBAL_SEGMENT_SIZE="32MiB"
        )
        assert diagnosis.status == 0, diagnosis.failures
        busy = kvstore("master", *ports)
    assert "default_kv_lease_ttl=5000" in master.output
    assert (busy.status, busy.output) == (1, "")
    assert f"port {rpc} of 127.0.0.1 is not available (Address already in use)" in busy.errors


def test_master_with_etcd_prints_the_settings_of_clients() -> None:
    lines = kvstore("master", "--print", "--etcd", "h1:2379;h2:2379", "--cluster-id", "prod").output.splitlines()
    assert "'--etcd_endpoints=http://h1:2379;http://h2:2379' --cluster_id=prod" in lines[0]
    assert lines[1:4] == [
        "export MOONCAKE_MASTER_SERVER_ADDR='etcd://h1:2379;h2:2379'",
        "export MC_STORE_CLUSTER_ID=prod",
        "export MOONCAKE_METADATA_SERVER=P2PHANDSHAKE",
    ]


def test_a_master_with_snapshots_gets_their_folder_and_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", "another's")  # so that it is restored afterwards
    monkeypatch.setenv("MOONCAKE_MASTER_SERVICE_SNAPSHOT_TEST_SKIP_CLEANUP", "")
    arguments = parse_master("--print", "--snapshot-dir", str(tmp_path), "--snapshot-interval", "7")
    assert master.run(arguments) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[0].removeprefix("# "))
    assert words[0] == f"MOONCAKE_SNAPSHOT_LOCAL_PATH={tmp_path}"
    assert {
        "--enable_snapshot=true",
        "--enable_snapshot_restore=true",
        "--snapshot_object_store_type=local",
        "--snapshot_interval_seconds=7",
    } <= set(words)


@pytest.mark.parametrize("flag", ["--oplog", "--enable_oplog=true"])
def test_the_masters_operation_log_goes_to_etcd(flag: str) -> None:
    assert "--enable_oplog=true" in master.build_command(parse_master("--etcd", "h1:2379", flag))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--oplog", "--oplog needs --etcd, which stores the operation log; with a single master use --snapshot-dir"),
        ("--snapshot-dir /tmp/x --etcd h1:2379", "--snapshot-dir has no effect with --etcd"),
        ("--snapshot-dir /tmp/x --ha_backend_connstring h1:2379", "--snapshot-dir has no effect with --etcd"),
        ("--snapshot-dir /tmp/x --snapshot-interval 0", "--snapshot-interval is 0; it must be at least one second"),
    ],
)
def test_invalid_flags_for_logs_and_snapshots_get_one_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        master.build_command(parse_master(*flags.split()))


def parse_master(*flags: str) -> argparse.Namespace:
    """Parse a command line of ``kvstore master``."""
    parser = argparse.ArgumentParser()
    master.add_arguments(parser)
    return parser.parse_args(flags)


def test_an_unknown_command_is_refused() -> None:
    ended = kvstore("docter")
    assert ended.status == 2
    assert "there is no command 'docter'; did you mean doctor?" in ended.errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "--bloks", "3"], "argument '--bloks' is not known; did you mean --blocks?"),
        (["stats", "memory:", "memory:"], "argument 'memory:' is not known; give only one CONFIG"),
    ],
)
def test_the_error_for_an_unknown_flag_suggests_a_flag(arguments: list[str], sentence: str) -> None:
    ended = kvstore(*arguments)
    assert ended.status == 2
    assert ended.errors.endswith(f"error: {sentence}\n")


def test_a_full_output_gets_one_sentence(tmp_path: Path) -> None:
    FileStore(tmp_path, 1 << 20).close()
    command = [sys.executable, "-m", "kvstore_backend.cli", "stats", f"file://{tmp_path}"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        "kvstore: the output could not be written completely: No space left on device\n",
    )


def test_the_version_of_mooncake_is_part_of_the_version() -> None:
    ended = kvstore("--version")
    assert ended.status == 0
    assert re.match(r"kvstore \S.*; (mooncake-transfer-engine\S* \S+|no Mooncake)\n", ended.output)


def test_the_command_line_of_fastdeploy_for_a_master_is_accepted() -> None:
    line = (
        "--port=15001 --enable_http_metadata_server=true --http_metadata_server_host=0.0.0.0 "
        "--http_metadata_server_port=15002 --metrics_port=15003"
    )
    lines = kvstore("master", "--print", *line.split()).output.splitlines()
    started = shlex.split(lines[0].removeprefix("# "))[1:]
    assert {"--rpc_port=15001", *line.split()[1:]} <= set(started)
    assert lines[2] == "export MOONCAKE_METADATA_SERVER=http://127.0.0.1:15002/metadata"
    assert "clients on other machines need --host 0.0.0.0" in lines[3]


def test_a_flag_of_mooncake_disables_the_metadata_server() -> None:
    lines = kvstore("master", "--print", "--enable_http_metadata_server=false").output.splitlines()
    assert "metadata_server" not in lines[0]
    assert lines[2] == "export MOONCAKE_METADATA_SERVER=P2PHANDSHAKE"


def test_flags_of_mooncake_name_several_masters_with_etcd() -> None:
    line = "--enable_ha=true --etcd_endpoints=http://h1:2379;http://h2:2379 --cluster_id=prod"
    lines = kvstore("master", "--print", *line.split()).output.splitlines()
    assert set(line.split()) <= set(shlex.split(lines[0].removeprefix("# ")))
    assert lines[1] == "export MOONCAKE_MASTER_SERVER_ADDR='etcd://h1:2379;h2:2379'"


@pytest.mark.parametrize(
    ("flags", "started", "joined"),
    [
        # FastDeploy's run_ha_redis.sh
        (
            "--ha_backend_type redis --ha_backend_connstring redis://127.0.0.1:6399",
            {"--ha_backend_type=redis", "--ha_backend_connstring=redis://127.0.0.1:6399"},
            "redis://127.0.0.1:6399",
        ),
        (
            "--ha_backend_type=redis --ha_backend_connstring=h:6379",
            {"--ha_backend_connstring=redis://h:6379"},
            "redis://h:6379",
        ),
        (
            "--ha_backend_type k8s --ha_backend_connstring ns/lease",
            {"--ha_backend_connstring=ns/lease"},
            "k8s://ns/lease",
        ),
        # FastDeploy's run_ha.sh, and the same with newer flags
        ("--etcd_endpoints http://h1:1;http://h2:1", {"--etcd_endpoints=http://h1:1;http://h2:1"}, "etcd://h1:1;h2:1"),
        ("--ha_backend_connstring http://h1:1,h2:1", {"--etcd_endpoints=http://h1:1;http://h2:1"}, "etcd://h1:1;h2:1"),
    ],
)
def test_flags_of_mooncake_start_one_of_several_masters(flags: str, started: set[str], joined: str) -> None:
    line = f"--enable_ha {flags} --cluster_id prod --rpc_address 127.0.0.1 --rpc_port 8081 --metrics_port=9091"
    lines = kvstore("master", "--print", *line.split()).output.splitlines()
    words = shlex.split(lines[0].removeprefix("# "))
    assert started | {"--enable_ha=true", "--cluster_id=prod", "--rpc_port=8081", "--metrics_port=9091"} <= set(words)
    assert not any("metadata_server" in word for word in words)
    assert lines[1:4] == [
        f"export MOONCAKE_MASTER_SERVER_ADDR='{joined}'",
        "export MC_STORE_CLUSTER_ID=prod",
        "export MOONCAKE_METADATA_SERVER=P2PHANDSHAKE",
    ]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--ha_backend_type redis", "--ha_backend_type redis needs --ha_backend_connstring with the address of this"),
        (
            "--ha_backend_type redis --ha_backend_connstring h",
            "--ha_backend_connstring is 'h'; redis:// must be followed by host:port",
        ),
        ("--etcd h1", "--etcd is 'h1'; etcd:// must be followed by host:port"),
        ("--etcd h1:1 --ha_backend_connstring h1:1", "--etcd and --ha_backend_connstring both name the service"),
        (
            "--ha_backend_type redis --ha_backend_connstring redis://secret@h:1",
            "--ha_backend_connstring is 'redis://...@h:1'; redis:// must be followed by host:port; set the password in",
        ),
        ("--ha_backend_type redis --ha_backend_connstring h:1 --oplog", "--oplog needs --etcd"),
        (
            "--ha_backend_type redis --ha_backend_connstring h:1",
            "--ha_backend_type is redis, and this build of Mooncake has no Redis backend (UNAVAILABLE_IN_CURRENT_MODE)",
        ),
    ],
)
def test_invalid_flags_for_several_masters_get_one_sentence(flags: str, sentence: str) -> None:
    ended = kvstore("master", *flags.split())
    assert ended.status == 1
    assert sentence in ended.errors


def test_a_slow_stop_is_announced(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "master.log") as master:
        pool = url(master, metadata_server="P2PHANDSHAKE")
        arguments = ["--block-size", "4KiB", "--blocks", "4", "--batches", "100000"]
        command = [sys.executable, "-m", "kvstore_backend.cli", "bench", pool, *arguments]
        with child(command, tmp_path / "log") as bench:
            keys = master.metrics_url.replace("/metrics", "/get_all_keys")
            bench.wait_for(lambda: bool(plain_http.get(keys).text.strip()), "storing")
            master.process.signal(signal.SIGSTOP)
            bench.signal(signal.SIGINT)
            bench.wait_for(lambda: "kvstore: stopping ..." in bench.output, "the message")
            master.process.signal(signal.SIGCONT)


@pytest.mark.parametrize("metadata_server", [None, "P2PHANDSHAKE"])
def test_stats_do_not_count_a_client_that_crashed(tmp_path: Path, metadata_server: str | None) -> None:
    with mooncake_master(tmp_path / "log") as master:
        changes: dict[str, object] = {"metadata_server": metadata_server} if metadata_server else {}
        opened = functools.partial(open_store, master.config(**changes))
        arguments = ["stats", url(master, **changes), "--master-metrics", master.metrics_url.split("/")[2]]
        with Peer(opened), Peer(opened) as crashed:
            assert json.loads(kvstore(*arguments, "--json").output)["clients"] == 2
            crashed.kill()
            figures = json.loads(kvstore(*arguments, "--json").output)
            table = kvstore(*arguments).output
    assert figures["clients"] == 1
    # The master lists the client for ten seconds, and this machine may be slower than that.
    assert figures["clients_gone"] == 1 or figures["capacity_bytes"] == 64 << 20
    assert re.search(r"clients +1(, and 1 that just ended)?\n", table)


def test_stats_do_not_count_a_client_that_left(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        arguments = ["--json", url(master), "--master-metrics", master.metrics_url.split("/")[2]]
        open_store(master.config()).close()
        figures = json.loads(kvstore("stats", *arguments).output)
    assert figures["clients"] == 0
    assert figures["clients_gone"] in (0, 1)


def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    commands = f"{script}\nCOMP_WORDS=(kvstore stats --wa) COMP_CWORD=2\n_shtab_kvstore kvstore --wa stats\n"
    commands += 'echo "${COMPREPLY[@]}"'
    assert subprocess.run(["bash"], input=commands, capture_output=True, text=True, check=True).stdout == "--watch\n"


def test_the_log_of_mooncake_is_shown_only_on_request(mooncake_master: MooncakeMaster) -> None:
    bench = ["bench", url(mooncake_master), "--json", "--batches", "1", "--warm-up", "0", "--block-size", "64KiB"]
    quiet = kvstore(*bench)
    assert (quiet.status, quiet.errors) == (0, "")
    assert "metadata not found" in kvstore(*bench, MC_LOG_LEVEL="ERROR").errors


def test_the_settings_of_clients_are_printed_again_when_the_master_is_ready(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(master, "_QUIET_SECONDS", 0.0)
    (port,) = free_ports(1)
    master._print_when_ready(["export A=b"], "127.0.0.1", port)
    output = ""
    assert capfd.readouterr().out == ""  # no master answers yet
    with socket.create_server(("127.0.0.1", port)):

        def is_printed() -> bool:
            nonlocal output
            output += capfd.readouterr().out
            return bool(output)

        wait_until(is_printed, "the lines")
    assert output == "\nThe master is ready. Set in its clients:\nexport A=b\n"
