"""Doctor on broken set-ups: each failure must name its cause and its remedy."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from kvstore_backend.cli.doctor import add_arguments, diagnose
from kvstore_backend.config import list_rdma_devices
from kvstore_backend.pool import open_store
from tests.kvstore_backend.cli.command import Diagnosis, doctor, kvstore
from tests.support.etcd import running_etcd
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.peer import Peer
from tests.support.ports import free_port, free_ports
from tests.support.timed_instance import timed_instance
from tests.support.waiting import port_answers, wait_until


def url(master: MooncakeMaster, **changes: object) -> str:
    """Return the URL of this master's pool."""
    settings = master.settings(**changes)
    address = settings.pop("master_server_addr")
    return f"mooncake://{address}?" + "&".join(f"{name}={value}" for name, value in settings.items())


def expect(diagnosis: Diagnosis, subject: str, cause: str, remedy: str) -> None:
    """Assert that only ``subject`` failed, and that its finding names cause and remedy."""
    assert diagnosis.status == 1
    assert list(diagnosis.failures) == [subject], diagnosis.failures
    report = diagnosis.failures[subject]
    assert cause in report
    assert remedy in report


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The configuration of a model with 8 KiB of KV per token."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


def test_a_working_pool_passes_all_checks(mooncake_master: MooncakeMaster, model: Path) -> None:
    admin = mooncake_master.metrics_url.removeprefix("http://").removesuffix("/metrics")
    diagnosis = doctor(url(mooncake_master), "--model", model, "--master-metrics", admin)
    assert diagnosis.status == 0
    assert {each["subject"] for each in diagnosis.of("ok")} >= {
        "configuration", "library", "memory", "master", "master's flags", "capacity", "trial",
    }  # fmt: skip


def test_a_metadata_server_that_is_open_to_other_machines_is_reported(mooncake_master: MooncakeMaster) -> None:
    findings = [each for each in doctor(url(mooncake_master)).of("warn") if each["subject"] == "metadata"]
    assert [each["text"].partition(" of http")[0] for each in findings] == ["the metadata server"]
    assert "listens on all addresses of this machine" in findings[0]["text"]
    assert "kvstore master --metadata-port 0" in findings[0]["remedy"]


def test_the_support_of_kv_events_is_reported(tmp_path: Path) -> None:
    """RFC 1527 of Mooncake; the wheel 0.3.13.post1 accepts the flags and publishes nothing."""
    (port,) = free_ports(1)
    flags = ("--enable_kv_events=true", f"--kv_events_bind_endpoint=tcp://127.0.0.1:{port}", "--kv_events_backend_id=a")
    with mooncake_master(tmp_path / "log", *flags) as master:
        publishes = port_answers(port)
        (line,) = [each for each in doctor(url(master)).of("ok") if each["subject"] == "KV events"]
    assert "enable_kv_events=1" in (tmp_path / "log").read_text()
    assert ("can publish KV events" in line["text"], "publishes no KV events" in line["text"]) == (
        publishes,
        not publishes,
    )


def test_the_text_for_people_ends_with_a_verdict(tmp_path: Path) -> None:
    ended = kvstore("doctor", f"file://{tmp_path}/pool?size=16MiB")
    assert ended.status == 0
    assert ended.errors == ""
    assert ended.output.splitlines()[0] == f"ok    configuration  file: {tmp_path}/pool, 16 MiB"
    assert ended.output.splitlines()[-1] == "the pool can be used"


def test_1_a_misspelt_key(tmp_path: Path) -> None:
    path = tmp_path / "mooncake_config.json"
    path.write_text('{"path": "' + str(tmp_path / "pool") + '", "szie": "64MiB", "comment": "ours"}')
    findings = doctor(MOONCAKE_CONFIG_PATH=str(path)).findings
    (warning,) = [each["text"] for each in findings if (each["level"], each["subject"]) == ("warn", "configuration")]
    assert warning == f'unknown keys in {path}, which are not used: "szie" (did you mean size?), "comment"'


def test_2_no_master_running() -> None:
    port = free_port()
    diagnosis = doctor(f"mooncake://127.0.0.1:{port}?protocol=tcp")
    cause = f"no Mooncake master answers at 127.0.0.1:{port} (Connection refused)"
    expect(diagnosis, "master", cause, f"kvstore master --port {port}")


def test_3_the_metrics_port_in_place_of_the_rpc_port(mooncake_master: MooncakeMaster) -> None:
    address = mooncake_master.metrics_url.split("/")[2]
    diagnosis = doctor(f"mooncake://{address}?protocol=tcp")
    expect(
        diagnosis,
        "master",
        f"an HTTP server answers at {address}",
        "master_server_addr must have the master's --rpc_port",
    )


def test_4_another_server_at_the_port_of_the_master(silent_port: int) -> None:
    diagnosis = doctor(f"mooncake://127.0.0.1:{silent_port}?protocol=tcp")
    cause = f"the server at 127.0.0.1:{silent_port} does not answer: it is not a Mooncake master, or it hangs"
    expect(diagnosis, "master", cause, "ss -tlnp shows which process listens there")


def test_5_a_master_that_hangs(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        master.process.signal(signal.SIGSTOP)
        diagnosis = doctor(url(master, metadata_server="P2PHANDSHAKE"))
        master.process.signal(signal.SIGCONT)
    expect(diagnosis, "master", "or it hangs", "restart the master")


def test_6_no_metadata_server(mooncake_master: MooncakeMaster) -> None:
    port = free_port()
    diagnosis = doctor(url(mooncake_master, metadata_server=f"http://127.0.0.1:{port}/metadata"))
    cause = f"no metadata server answers at http://127.0.0.1:{port}/metadata"
    expect(diagnosis, "metadata", cause, f"--enable_http_metadata_server=true --http_metadata_server_port={port}")


def test_7_another_server_in_place_of_the_metadata_server(mooncake_master: MooncakeMaster) -> None:
    diagnosis = doctor(url(mooncake_master, metadata_server=mooncake_master.metrics_url))
    expect(
        diagnosis,
        "metadata",
        "is not Mooncake's metadata server: it answers with status 200",
        "the URL must have the path /metadata",
    )


@pytest.mark.skipif(bool(list_rdma_devices()), reason="this machine has RDMA devices")
def test_8_rdma_without_a_device(mooncake_master: MooncakeMaster) -> None:
    diagnosis = doctor(url(mooncake_master, protocol="rdma"))
    expect(diagnosis, "configuration", "this machine has no RDMA device", "set tcp, or leave the protocol out")


def test_9_a_library_that_cannot_be_loaded(mooncake_master: MooncakeMaster, tmp_path: Path) -> None:
    (tmp_path / "mooncake.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    diagnosis = doctor(url(mooncake_master), PYTHONPATH=str(tmp_path))
    cause = "Mooncake's library cannot be loaded (libcudart.so.12: cannot open shared object file)"
    expect(diagnosis, "library", cause, "pip install mooncake-transfer-engine-non-cuda")
    expect(diagnosis, "library", cause, "with CUDA 13: mooncake-transfer-engine-cuda13")


def test_10_an_invalid_size() -> None:
    diagnosis = doctor(MOONCAKE_MASTER_SERVER_ADDR="127.0.0.1:15001", MOONCAKE_GLOBAL_SEGMENT_SIZE="4 gigs")
    expect(diagnosis, "configuration", "MOONCAKE_GLOBAL_SEGMENT_SIZE is '4 gigs'", 'text such as "4GiB"')


def test_11_a_segment_too_small_for_one_prompt(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 800}))
    with mooncake_master(tmp_path / "log") as master:
        diagnosis = doctor(url(master), "--model", model)
    cause = "each process with this configuration gives 64 MiB, and the processes that have joined give 0 bytes"
    expect(diagnosis, "capacity", cause, "raise global_segment_size to at least 781.2 MiB")


def test_12_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "pool").write_text("")
    diagnosis = doctor(f"file://{tmp_path}/pool/blocks")
    expect(diagnosis, "folder", f"{tmp_path}/pool is a file, not a folder", "name another folder, or remove the file")


def test_13_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        expect(doctor(f"file://{folder}"), "folder", f"{folder} belongs to user 12345", f"chown 0 {folder}")
    else:
        folder.chmod(0o500)
        expect(doctor(f"file://{folder}"), "folder", f"{folder} is not writable", "make it writable")


def test_a_folder_with_other_data_is_not_changed(tmp_path: Path) -> None:
    photos = tmp_path / "blocks" / "2024" / "photos.tar"
    photos.parent.mkdir(parents=True)
    photos.touch()
    diagnosis = doctor(f"file://{tmp_path}?size=1MiB")
    expect(
        diagnosis,
        "folder",
        f"{tmp_path} contains blocks and no ledger, so it is not the folder of a pool",
        "name a new or an empty",
    )
    assert photos.exists()


def test_14_clients_with_another_metadata_server(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        admin = master.metrics_url.split("/")[2]
        with_handshake = master.config(metadata_server="P2PHANDSHAKE")
        with Peer(functools.partial(open_store, with_handshake)):
            diagnosis = doctor(url(master), "--master-metrics", admin)
    expect(diagnosis, "sharing", "1 of 1 clients (127.0.0.1:", "use one metadata_server in all clients")
    assert "joined with P2PHANDSHAKE" in diagnosis.failures["sharing"]


def test_15_a_pool_without_memory(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        diagnosis = doctor(url(master, global_segment_size=0))
    expect(diagnosis, "capacity", "no client gives memory to the pool", "set global_segment_size in a client")


def test_16_no_etcd_for_a_pool_with_several_masters() -> None:
    port = free_port()
    diagnosis = doctor(f"etcd://127.0.0.1:{port}?protocol=tcp")
    expect(diagnosis, "etcd", f"no etcd answers at etcd://127.0.0.1:{port}", "start etcd there")


def test_17_a_cluster_of_masters_that_is_not_in_etcd(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as address:
        flags = ("--enable_ha=true", f"--etcd_endpoints=http://{address}", "--cluster_id=prod")
        with mooncake_master(tmp_path / "log", *flags):
            pool = f"etcd://{address}?protocol=tcp&metadata_server=P2PHANDSHAKE&global_segment_size=32MiB"
            right = wait_until(lambda: _usable(doctor(f"{pool}&cluster_id=prod")), "a leader elected")
            wrong = doctor(f"{pool}&cluster_id=test")
    assert right is not None
    assert "leads the cluster prod" in next(each["text"] for each in right.findings if each["subject"] == "etcd")
    assert "the cluster 'test' has no leading master; etcd knows the clusters prod" in wrong.failures["etcd"]
    assert "correct cluster_id" in wrong.failures["etcd"]


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        (
            "redis://127.0.0.1:1?metadata_server=P2PHANDSHAKE",
            "this build of Mooncake has no Redis backend (UNAVAILABLE",
        ),
        (
            "k8s://default/lease?local_hostname=127.0.0.1",
            "this build of Mooncake has no Kubernetes backend (UNAVAILABLE",
        ),
        ("mooncake://127.0.0.1:1?metadata_server=redis://127.0.0.1:1", "has no client for Redis there"),
    ],
)
def test_18_a_client_that_this_build_of_mooncake_lacks(pool: str, sentence: str) -> None:
    report = doctor(f"{pool}&protocol=tcp").failures["library"]
    assert sentence in report
    assert "or build Mooncake with -D" in report


def test_19_an_unreachable_etcd_for_metadata() -> None:
    (port,) = free_ports(1)
    report = doctor(f"mooncake://127.0.0.1:1?protocol=tcp&metadata_server=etcd://127.0.0.1:{port}").failures["metadata"]
    assert f"no etcd answers at etcd://127.0.0.1:{port}" in report
    assert "start etcd there" in report


def _usable(diagnosis: Diagnosis) -> Diagnosis | None:
    return diagnosis if diagnosis.status == 0 else None


def test_20_a_configuration_of_mindie_with_the_pool_off(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"BackendConfig": {"kvPoolConfig": {"backend": "", "configPath": ""}}}')
    expect(
        doctor(path),
        "configuration",
        "the configuration turns the pool off",
        'set "backend": "mooncake" in kvPoolConfig',
    )


def test_21_a_local_hostname_of_another_machine(mooncake_master: MooncakeMaster) -> None:
    diagnosis = doctor(url(mooncake_master, local_hostname="192.0.2.1"))
    expect(diagnosis, "local_hostname", "192.0.2.1 resolves to 192.0.2.1, which is not an address of", "leave local_")


def test_22_an_ssd_folder_with_a_master_that_does_not_offload(mooncake_master: MooncakeMaster, tmp_path: Path) -> None:
    pool = url(mooncake_master, enable_ssd_offload="true", ssd_offload_path=str(tmp_path))
    expect(
        doctor(pool), "trial", "does not offload to SSD", "start it with --enable_offload=true (kvstore master --ssd)"
    )


def test_the_error_without_a_configuration_names_the_variables() -> None:
    expect(doctor(), "configuration", "no pool is configured", "MOONCAKE_CONFIG_PATH or MOONCAKE_MASTER_SERVER_ADDR")


def test_a_memory_pool_is_usable_with_a_warning() -> None:
    diagnosis = doctor("memory:?size=1MiB")
    assert diagnosis.status == 0
    assert [each["subject"] for each in diagnosis.of("warn")] == ["sharing"]


def test_a_folder_larger_than_its_filesystem_is_usable_with_a_warning(tmp_path: Path) -> None:
    diagnosis = doctor(f"file://{tmp_path}/pool?size=900TiB")
    assert diagnosis.status == 0
    assert [each["subject"] for each in diagnosis.of("warn")] == ["folder"]


def test_a_folder_that_cannot_be_created_is_reported() -> None:
    report = doctor("file:///proc/kvpool").failures["folder"]  # not even root can
    assert report == "no folder can be created in /proc: No such file or directory -> name another folder"


def test_a_folder_that_does_not_exist_is_reported_and_not_created(tmp_path: Path) -> None:
    diagnosis = doctor(f"file://{tmp_path}/misspelt/pool?size=1MiB")
    assert diagnosis.status == 0
    report = {each["subject"]: each["text"] for each in diagnosis.of("ok")}
    assert report["folder"].startswith(f"{tmp_path}/misspelt/pool does not exist; it will be created at its first use")
    assert "read with equal bytes" in report["trial"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_model_is_reported(tmp_path: Path) -> None:
    cause = f"{tmp_path}/config.json cannot be read: No such file or directory"
    expect(doctor("memory:", "--model", tmp_path), "model", cause, "give --model the folder of a checkpoint")


def test_only_the_sizing_is_reported_without_a_pool() -> None:
    diagnosis = doctor("--cards", 128, "--memory-factor", 0.92)
    assert diagnosis.status == 0
    assert [each["subject"] for each in diagnosis.findings] == ["HCCL links", "memory factor", "context"]


def test_a_file_with_rdma_passes_if_the_variable_sets_tcp(mooncake_master: MooncakeMaster, tmp_path: Path) -> None:
    path = tmp_path / "mooncake_config.json"
    path.write_text(json.dumps(mooncake_master.settings(protocol="rdma")))
    named = {"MOONCAKE_CONFIG_PATH": str(path)}
    if not list_rdma_devices():
        expect(doctor(**named), "configuration", f"\"protocol\" in {path} is 'rdma'", "or set MOONCAKE_PROTOCOL=tcp")
    for diagnosis in (doctor(**named, MOONCAKE_PROTOCOL="tcp"), doctor(path, MOONCAKE_PROTOCOL="tcp")):
        assert diagnosis.status == 0, diagnosis.failures
        assert f'MOONCAKE_PROTOCOL=tcp overrides "protocol" in {path}, which is rdma' in [
            each["text"] for each in diagnosis.of("warn")
        ]


def test_the_verdict_says_that_only_sizes_were_computed() -> None:
    ended = kvstore("doctor", "--cards", 128)
    assert ended.status == 0
    assert ended.output.splitlines()[-1] == "a pool of these cards can be built; only memory sizes were computed"
    assert not json.loads(kvstore("doctor", "--cards", 128, "--json").output)["tried"]
    assert "a pool of these cards cannot be built" in kvstore("doctor", "--cards", 600).output


def test_the_report_says_whether_the_pool_was_tried(tmp_path: Path) -> None:
    assert json.loads(kvstore("doctor", "--json", "memory:?size=1MiB").output)["tried"]
    assert not json.loads(kvstore("doctor", "--json", f"file://{__file__}").output)["tried"]


def test_the_memory_of_links_is_reported_in_tokens_of_the_model(model: Path) -> None:
    (finding,) = [each for each in doctor("--cards", 128, "--model", model).findings if each["subject"] == "context"]
    assert "600 MB less for KV on every card" in finding["text"]
    assert "about 73242 tokens less at 8 KiB of KV per token" in finding["text"]


@pytest.mark.parametrize(
    ("start_instance", "level", "text"),
    [
        (partial(timed_instance, 0.001, context=100), "ok", "faster"),
        (
            partial(timed_instance, 0.0, context=10**8, tokens_per_word=10**6),
            "warn",
            "loading is slower than computing: 1000",
        ),
    ],
    ids=["slow instance", "fast instance"],
)
def test_loading_is_compared_with_computing(
    tmp_path: Path, model: Path, start_instance: Callable[[], AbstractContextManager[str]], level: str, text: str
) -> None:
    pool = f"file://{tmp_path}/pool?size=64MiB"
    with start_instance() as instance:
        diagnosis = doctor(pool, "--model", model, "--instance", instance.removeprefix("http://"))
    assert diagnosis.status == 0
    (verdict,) = [each["text"] for each in diagnosis.of(level) if each["subject"] == "worth it"]
    assert text in verdict
    assert "1000 tokens of KV (7.812 MiB) take" in verdict


@pytest.mark.parametrize(
    ("fixed", "report"),
    [(0.002, "every hit is faster"), (0.1, "hits of 84 tokens or more are faster")],
    ids=["fast", "slow"],
)
def test_the_least_length_of_a_useful_hit_is_reported(
    monkeypatch: pytest.MonkeyPatch, model: Path, fixed: float, report: str
) -> None:
    monkeypatch.setattr("kvstore_backend.cli.doctor.time_loading", lambda *_: (fixed, 0.0))
    monkeypatch.setattr("kvstore_backend.cli.doctor.time_computing", lambda _: 0.0012)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = ["memory:?size=1MiB", "--model", str(model), "--instance", "127.0.0.1:1"]
    (verdict,) = [each.text for each in diagnose(parser.parse_args(arguments)) if each.subject == "worth it"]
    assert verdict.endswith(f"{1000 * fixed:g} ms to load, and this instance 1,200 ms to compute: {report}")


def test_the_reason_is_reported_if_loading_cannot_be_compared(tmp_path: Path, model: Path) -> None:
    pool = f"file://{tmp_path}/pool?size=64MiB"
    report = {}
    for name, arguments in {"no model": [], "no instance": ["--model", model]}.items():
        diagnosis = doctor(pool, "--instance", f"http://127.0.0.1:{free_port()}", *arguments)
        assert diagnosis.status == 0
        (report[name],) = [each["text"] for each in diagnosis.of("warn") if each["subject"] == "worth it"]
    assert "the size of the instance's KV is not known" in report["no model"]
    assert "does not answer" in report["no instance"]
