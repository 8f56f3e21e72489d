"""Doctor, over set-ups that are really broken: each must be told its cause and its remedy."""

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
    """The URL of this master's pool."""
    settings = master.settings(**changes)
    address = settings.pop("master_server_addr")
    return f"mooncake://{address}?" + "&".join(f"{name}={value}" for name, value in settings.items())


def told(diagnosis: Diagnosis, subject: str, cause: str, remedy: str) -> None:
    """Assert that this is all that failed, and that cause and remedy are named."""
    assert diagnosis.status == 1
    assert list(diagnosis.failures) == [subject], diagnosis.failures
    said = diagnosis.failures[subject]
    assert cause in said
    assert remedy in said


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where somebody listens and never says a word."""
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


def test_a_pool_that_works_passes_in_every_respect(mooncake_master: MooncakeMaster, model: Path) -> None:
    admin = mooncake_master.metrics_url.removeprefix("http://").removesuffix("/metrics")
    diagnosis = doctor(url(mooncake_master), "--model", model, "--master-metrics", admin)
    assert diagnosis.status == 0
    assert {each["subject"] for each in diagnosis.of("ok")} >= {
        "configuration", "library", "memory", "master", "master's flags", "capacity", "trial",
    }  # fmt: skip


def test_a_metadata_server_that_strangers_reach_is_told(mooncake_master: MooncakeMaster) -> None:
    told = [each for each in doctor(url(mooncake_master)).of("warn") if each["subject"] == "metadata"]
    assert [each["text"].partition(" of http")[0] for each in told] == ["the metadata server"]
    assert "listens on all addresses of this machine" in told[0]["text"]
    assert "kvstore master --metadata-port 0" in told[0]["remedy"]


def test_whether_the_master_publishes_kv_events_is_told(tmp_path: Path) -> None:
    """RFC 1527 of Mooncake; the wheel 0.3.13.post1 takes the flags and publishes nothing."""
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


def test_its_lines_read_for_people_as_well(tmp_path: Path) -> None:
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
    told(diagnosis, "master", cause, f"kvstore master --port {port}")


def test_3_the_metrics_port_for_the_masters(mooncake_master: MooncakeMaster) -> None:
    address = mooncake_master.metrics_url.split("/")[2]
    diagnosis = doctor(f"mooncake://{address}?protocol=tcp")
    told(
        diagnosis,
        "master",
        f"an HTTP server answers at {address}",
        "master_server_addr must have the master's --rpc_port",
    )


def test_4_something_else_at_the_masters_port(silent_port: int) -> None:
    diagnosis = doctor(f"mooncake://127.0.0.1:{silent_port}?protocol=tcp")
    cause = f"the server at 127.0.0.1:{silent_port} does not answer: it is not a Mooncake master, or it hangs"
    told(diagnosis, "master", cause, "ss -tlnp shows which process listens there")


def test_5_a_master_that_hangs(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        master.process.signal(signal.SIGSTOP)
        diagnosis = doctor(url(master, metadata_server="P2PHANDSHAKE"))
        master.process.signal(signal.SIGCONT)
    told(diagnosis, "master", "or it hangs", "restart the master")


def test_6_no_metadata_server(mooncake_master: MooncakeMaster) -> None:
    port = free_port()
    diagnosis = doctor(url(mooncake_master, metadata_server=f"http://127.0.0.1:{port}/metadata"))
    cause = f"no metadata server answers at http://127.0.0.1:{port}/metadata"
    told(diagnosis, "metadata", cause, f"--enable_http_metadata_server=true --http_metadata_server_port={port}")


def test_7_something_else_for_the_metadata_server(mooncake_master: MooncakeMaster) -> None:
    diagnosis = doctor(url(mooncake_master, metadata_server=mooncake_master.metrics_url))
    told(
        diagnosis,
        "metadata",
        "is not Mooncake's metadata server: it answers with status 200",
        "the URL must have the path /metadata",
    )


@pytest.mark.skipif(bool(list_rdma_devices()), reason="this machine has RDMA devices")
def test_8_rdma_without_a_device(mooncake_master: MooncakeMaster) -> None:
    diagnosis = doctor(url(mooncake_master, protocol="rdma"))
    told(diagnosis, "configuration", "this machine has no RDMA device", "set tcp, or leave the protocol out")


def test_9_a_library_that_cannot_be_loaded(mooncake_master: MooncakeMaster, tmp_path: Path) -> None:
    (tmp_path / "mooncake.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    diagnosis = doctor(url(mooncake_master), PYTHONPATH=str(tmp_path))
    cause = "Mooncake's library cannot be loaded (libcudart.so.12: cannot open shared object file)"
    told(diagnosis, "library", cause, "pip install mooncake-transfer-engine-non-cuda")
    told(diagnosis, "library", cause, "with CUDA 13: mooncake-transfer-engine-cuda13")


def test_10_a_size_that_is_none() -> None:
    diagnosis = doctor(MOONCAKE_MASTER_SERVER_ADDR="127.0.0.1:15001", MOONCAKE_GLOBAL_SEGMENT_SIZE="4 gigs")
    told(diagnosis, "configuration", "MOONCAKE_GLOBAL_SEGMENT_SIZE is '4 gigs'", 'text such as "4GiB"')


def test_11_a_segment_too_small_for_one_prompt(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 800}))
    with mooncake_master(tmp_path / "log") as master:
        diagnosis = doctor(url(master), "--model", model)
    cause = "each process with this configuration gives 64 MiB, and the processes that have joined give 0 bytes"
    told(diagnosis, "capacity", cause, "raise global_segment_size to at least 781.2 MiB")


def test_12_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "pool").write_text("")
    diagnosis = doctor(f"file://{tmp_path}/pool/blocks")
    told(diagnosis, "folder", f"{tmp_path}/pool is a file, not a folder", "name another folder, or remove the file")


def test_13_a_folder_of_somebody_elses(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        told(doctor(f"file://{folder}"), "folder", f"{folder} belongs to user 12345", f"chown 0 {folder}")
    else:
        folder.chmod(0o500)
        told(doctor(f"file://{folder}"), "folder", f"{folder} is not writable", "make it writable")


def test_a_folder_of_the_users_own_data_is_left_as_it_is(tmp_path: Path) -> None:
    photos = tmp_path / "blocks" / "2024" / "photos.tar"
    photos.parent.mkdir(parents=True)
    photos.touch()
    diagnosis = doctor(f"file://{tmp_path}?size=1MiB")
    told(
        diagnosis,
        "folder",
        f"{tmp_path} contains blocks and no ledger, so it is not the folder of a pool",
        "name a new or an empty",
    )
    assert photos.exists()


def test_14_clients_that_joined_in_another_way(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        admin = master.metrics_url.split("/")[2]
        shaking = master.config(metadata_server="P2PHANDSHAKE")
        with Peer(functools.partial(open_store, shaking)):
            diagnosis = doctor(url(master), "--master-metrics", admin)
    told(diagnosis, "sharing", "1 of 1 clients (127.0.0.1:", "use one metadata_server in all clients")
    assert "joined with P2PHANDSHAKE" in diagnosis.failures["sharing"]


def test_15_a_pool_that_nobody_gives_memory(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        diagnosis = doctor(url(master, global_segment_size=0))
    told(diagnosis, "capacity", "no client gives memory to the pool", "set global_segment_size in a client")


def test_16_no_etcd_behind_a_pool_with_several_masters() -> None:
    port = free_port()
    diagnosis = doctor(f"etcd://127.0.0.1:{port}?protocol=tcp")
    told(diagnosis, "etcd", f"no etcd answers at etcd://127.0.0.1:{port}", "start etcd there")


def test_17_a_cluster_of_masters_that_etcd_does_not_know(tmp_path: Path) -> None:
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
def test_18_what_this_build_of_mooncake_lacks_is_said(pool: str, sentence: str) -> None:
    said = doctor(f"{pool}&protocol=tcp").failures["library"]
    assert sentence in said
    assert "or build Mooncake with -D" in said


def test_19_an_etcd_for_metadata_that_is_not_there() -> None:
    (port,) = free_ports(1)
    said = doctor(f"mooncake://127.0.0.1:1?protocol=tcp&metadata_server=etcd://127.0.0.1:{port}").failures["metadata"]
    assert f"no etcd answers at etcd://127.0.0.1:{port}" in said
    assert "start etcd there" in said


def _usable(diagnosis: Diagnosis) -> Diagnosis | None:
    return diagnosis if diagnosis.status == 0 else None


def test_18_mindies_configuration_with_the_pool_off(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"BackendConfig": {"kvPoolConfig": {"backend": "", "configPath": ""}}}')
    told(
        doctor(path),
        "configuration",
        "the configuration turns the pool off",
        'set "backend": "mooncake" in kvPoolConfig',
    )


def test_19_a_local_hostname_that_is_another_machines(mooncake_master: MooncakeMaster) -> None:
    diagnosis = doctor(url(mooncake_master, local_hostname="192.0.2.1"))
    told(diagnosis, "local_hostname", "192.0.2.1 resolves to 192.0.2.1, which is not an address of", "leave local_")


def test_20_an_ssd_folder_at_a_master_that_does_not_offload(mooncake_master: MooncakeMaster, tmp_path: Path) -> None:
    pool = url(mooncake_master, enable_ssd_offload="true", ssd_offload_path=str(tmp_path))
    told(doctor(pool), "trial", "does not offload to SSD", "start it with --enable_offload=true (kvstore master --ssd)")


def test_nothing_configured_is_said_with_what_may_be() -> None:
    told(doctor(), "configuration", "no pool is configured", "MOONCAKE_CONFIG_PATH or MOONCAKE_MASTER_SERVER_ADDR")


def test_memory_that_is_shared_with_nobody_is_usable_with_a_warning() -> None:
    diagnosis = doctor("memory:?size=1MiB")
    assert diagnosis.status == 0
    assert [each["subject"] for each in diagnosis.of("warn")] == ["sharing"]


def test_a_folder_larger_than_its_filesystem_is_usable_with_a_warning(tmp_path: Path) -> None:
    diagnosis = doctor(f"file://{tmp_path}/pool?size=900TiB")
    assert diagnosis.status == 0
    assert [each["subject"] for each in diagnosis.of("warn")] == ["folder"]


def test_a_folder_where_none_can_be_made_is_said() -> None:
    said = doctor("file:///proc/kvpool").failures["folder"]  # not even root can
    assert said == "no folder can be created in /proc: No such file or directory -> name another folder"


def test_a_folder_that_does_not_exist_is_said_and_not_made(tmp_path: Path) -> None:
    diagnosis = doctor(f"file://{tmp_path}/misspelt/pool?size=1MiB")
    assert diagnosis.status == 0
    said = {each["subject"]: each["text"] for each in diagnosis.of("ok")}
    assert said["folder"].startswith(f"{tmp_path}/misspelt/pool does not exist; it will be created at its first use")
    assert "read with equal bytes" in said["trial"]
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_none_is_named(tmp_path: Path) -> None:
    cause = f"{tmp_path}/config.json cannot be read: No such file or directory"
    told(doctor("memory:", "--model", tmp_path), "model", cause, "give --model the folder of a checkpoint")


def test_only_the_sizing_is_told_where_only_that_is_asked() -> None:
    diagnosis = doctor("--cards", 128, "--memory-factor", 0.92)
    assert diagnosis.status == 0
    assert [each["subject"] for each in diagnosis.findings] == ["HCCL links", "memory factor", "context"]


def test_a_file_that_says_rdma_passes_with_the_variable_that_says_tcp(
    mooncake_master: MooncakeMaster, tmp_path: Path
) -> None:
    path = tmp_path / "mooncake_config.json"
    path.write_text(json.dumps(mooncake_master.settings(protocol="rdma")))
    named = {"MOONCAKE_CONFIG_PATH": str(path)}
    if not list_rdma_devices():
        told(doctor(**named), "configuration", f"\"protocol\" in {path} is 'rdma'", "or set MOONCAKE_PROTOCOL=tcp")
    for diagnosis in (doctor(**named, MOONCAKE_PROTOCOL="tcp"), doctor(path, MOONCAKE_PROTOCOL="tcp")):
        assert diagnosis.status == 0, diagnosis.failures
        assert f'MOONCAKE_PROTOCOL=tcp overrides "protocol" in {path}, which is rdma' in [
            each["text"] for each in diagnosis.of("warn")
        ]


def test_where_only_sizes_were_computed_no_pool_is_said_to_be_tried() -> None:
    ended = kvstore("doctor", "--cards", 128)
    assert ended.status == 0
    assert ended.output.splitlines()[-1] == "a pool of these cards can be built; only memory sizes were computed"
    assert not json.loads(kvstore("doctor", "--cards", 128, "--json").output)["tried"]
    assert "a pool of these cards cannot be built" in kvstore("doctor", "--cards", 600).output


def test_a_pool_that_was_tried_is_told_from_one_that_was_not(tmp_path: Path) -> None:
    assert json.loads(kvstore("doctor", "--json", "memory:?size=1MiB").output)["tried"]
    assert not json.loads(kvstore("doctor", "--json", f"file://{__file__}").output)["tried"]


def test_the_context_that_links_cost_is_told_in_tokens_of_the_model(model: Path) -> None:
    (finding,) = [each for each in doctor("--cards", 128, "--model", model).findings if each["subject"] == "context"]
    assert "600 MB less for KV on every card" in finding["text"]
    assert "about 73242 tokens less at 8 KiB of KV per token" in finding["text"]


@pytest.mark.parametrize(
    ("instance_of", "level", "text"),
    [
        (partial(timed_instance, 0.001, context=100), "ok", "faster"),
        (
            partial(timed_instance, 0.0, context=10**8, tokens_per_word=10**6),
            "warn",
            "loading is slower than computing: 1000",
        ),
    ],
    ids=["slow instance", "quick instance"],
)
def test_a_pool_is_compared_with_an_instances_computing(
    tmp_path: Path, model: Path, instance_of: Callable[[], AbstractContextManager[str]], level: str, text: str
) -> None:
    pool = f"file://{tmp_path}/pool?size=64MiB"
    with instance_of() as instance:
        diagnosis = doctor(pool, "--model", model, "--instance", instance.removeprefix("http://"))
    assert diagnosis.status == 0
    (verdict,) = [each["text"] for each in diagnosis.of(level) if each["subject"] == "worth it"]
    assert text in verdict
    assert "1000 tokens of KV (7.812 MiB) take" in verdict


@pytest.mark.parametrize(
    ("fixed", "said"),
    [(0.002, "every hit is faster"), (0.1, "hits of 84 tokens or more are faster")],
    ids=["quick", "slow"],
)
def test_the_length_from_which_on_hits_pay_is_told_where_a_block_may_be_shorter(
    monkeypatch: pytest.MonkeyPatch, model: Path, fixed: float, said: str
) -> None:
    monkeypatch.setattr("kvstore_backend.cli.doctor.time_loading", lambda *_: (fixed, 0.0))
    monkeypatch.setattr("kvstore_backend.cli.doctor.time_computing", lambda _: 0.0012)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = ["memory:?size=1MiB", "--model", str(model), "--instance", "127.0.0.1:1"]
    (verdict,) = [each.text for each in diagnose(parser.parse_args(arguments)) if each.subject == "worth it"]
    assert verdict.endswith(f"{1000 * fixed:g} ms to load, and this instance 1,200 ms to compute: {said}")


def test_what_keeps_loading_from_being_compared_is_said(tmp_path: Path, model: Path) -> None:
    pool = f"file://{tmp_path}/pool?size=64MiB"
    said = {}
    for name, arguments in {"no model": [], "no instance": ["--model", model]}.items():
        diagnosis = doctor(pool, "--instance", f"http://127.0.0.1:{free_port()}", *arguments)
        assert diagnosis.status == 0
        (said[name],) = [each["text"] for each in diagnosis.of("warn") if each["subject"] == "worth it"]
    assert "the size of the instance's KV is not known" in said["no model"]
    assert "does not answer" in said["no instance"]
