"""Operator commands that need real Mooncake pools, with a master and tenants."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence

import pytest

from kvstore_backend.backend import Status, StorageBackend, Value
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import open_store
from kvstore_backend.stores.mooncake import MooncakeStore
from kvstore_backend.stores.mooncake_admin import MasterAdmin
from tests.kvstore_backend.cli.operator.pools import Commands, fill_pool, space
from tests.kvstore_backend.cli.test_doctor import url
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster
from tests.support.mooncake import mooncake_master as running_mooncake_master
from tests.support.strict_registration import Announcing
from tests.support.waiting import wait_until

MIB = 1 << 20
PROMPT = list(range(12))


@pytest.fixture(scope="module")
def owner(mooncake_master: MooncakeMaster) -> Iterator[StorageBackend]:
    """A client that gives memory to the shared pool."""
    opened = open_store(mooncake_master.config())
    yield opened
    opened.close()


@pytest.fixture
def namespace() -> Namespace:
    """A namespace for one test, because all tests share the pool."""
    return space(secrets.token_hex(8))


def pool(master: MooncakeMaster, **changes: object) -> list[str]:
    """Return the arguments for a master's pool; the commands give it no memory."""
    changes = {"global_segment_size": 0, **changes}
    return [url(master, **changes), "--master-metrics", master.metrics_url.split("/")[2]]


def count_pins(master: MooncakeMaster) -> float:
    """Count the keys that the master protects from eviction now."""
    return MasterAdmin(master.metrics_url.split("/")[2]).fetch_metrics()["master_soft_pin_key_count"]


@pytest.mark.usefixtures("owner")
def test_blocks_are_listed_pinned_and_removed(
    mooncake_master: MooncakeMaster, namespace: Namespace, kvstore: Commands
) -> None:
    keys = fill_pool(mooncake_master.config(global_segment_size=0), namespace, PROMPT)
    where = pool(mooncake_master)
    named = ["--namespace", namespace.digest]
    [row] = kvstore("ls", *where, *named, "--json").json["namespaces"]
    assert (row["blocks"], row["bytes"], row["manifest"]["facts"]["name"]) == (3, 3 * 1128, namespace.model)

    before = count_pins(mooncake_master)
    assert kvstore("pin", *where, *named, "--dry-run").output.startswith("3 blocks of namespace")
    assert count_pins(mooncake_master) == before
    assert "3 blocks" in kvstore("pin", *where, *named, "--for", "1h").output
    assert count_pins(mooncake_master) == before + 3
    assert "1 blocks" in kvstore("unpin", *where, *named, "--tokens", "0,1,2,3").output
    assert count_pins(mooncake_master) == before + 2
    nothing = kvstore("pin", *where, *named, "--tokens", "9,9,9,9")
    assert nothing.sentence == "the pool has none of the selected blocks, or they are damaged, so nothing is pinned"
    assert nothing.output == f"0 blocks of namespace {namespace.digest} pinned (1 not in the pool)\n"
    assert kvstore("unpin", *where, *named, "--tokens", "9,9,9,9").status == 0
    assert kvstore("pin", *where, *named, "--for", "9" * 400).status == 2
    assert kvstore("pin", *where, *named, "--for", "999999999d").sentence.startswith("not all blocks were pinned: ")
    elsewhere = kvstore("ls", where[0], "--master-metrics", "127.0.0.1:1").sentence
    assert elsewhere.startswith("no master answers with its metrics at 127.0.0.1:1; correct --master-metrics, ")
    too_long = kvstore("pin", *where, *named, "--for", "30d")
    assert (too_long.status, too_long.output.splitlines()[0]) == (
        1,
        f"0 blocks of namespace {namespace.digest} pinned (3 could not be read or written)",
    )
    assert "--for is longer than the master allows" in too_long.sentence
    [prefix] = kvstore("ls", *where, *named, "--tokens", "0 1 2 3 4 5 6 7", "--json").json["prefixes"]
    assert (prefix["found"], prefix["blocks"]) == (2, 2)
    assert kvstore("clear", *where, *named, "--tokens", "0,1,2,3").output.startswith("1 blocks removed")
    assert kvstore("clear", *where, *named).output.startswith("2 blocks removed")
    remaining = set(MasterAdmin(where[-1]).stream_keys())
    assert not remaining & set(keys)


@pytest.mark.usefixtures("owner")
def test_clear_with_a_tenant_removes_no_blocks_of_another_tenant(
    mooncake_master: MooncakeMaster, namespace: Namespace, kvstore: Commands
) -> None:
    where = pool(mooncake_master)
    keys = [
        key
        for tenant in ("a", "b")
        for key in fill_pool(mooncake_master.config(global_segment_size=0, tenant_id=tenant), namespace, PROMPT)
    ]
    ended = kvstore("clear", *where, "--tenant", "a", "--all")
    assert ended.sentence.startswith("the master does not separate tenants, so --all would remove the blocks of all")
    assert set(keys) <= set(MasterAdmin(where[-1]).stream_keys())
    assert kvstore("clear", *where, "--tenant", "a", "--namespace", keys[0].split("-")[1]).status == 0
    assert set(keys) & set(MasterAdmin(where[-1]).stream_keys()) == set(keys[3:])


def test_a_damaged_block_is_not_written_again(
    mooncake_master: MooncakeMaster, owner: StorageBackend, namespace: Namespace, kvstore: Commands
) -> None:
    [key, *_] = fill_pool(mooncake_master.config(global_segment_size=0), namespace, PROMPT[:4])
    assert owner.remove([key], force=True) == [Status.OK]
    memory = Memory(b"something else")
    assert owner.put([key], [memory.value]) == [Status.OK]
    ended = kvstore("pin", *pool(mooncake_master), "--namespace", namespace.digest, "--json")
    assert ended.status == 1
    report = json.loads(ended.output)["namespaces"]
    assert report == {namespace.digest: {"done": 0, "absent": 0, "damaged": 1, "failed": 0}}
    ended = kvstore("unpin", *pool(mooncake_master), "--namespace", namespace.digest)
    assert (ended.status, ended.sentence.partition(",")[0]) == (1, "damaged blocks are not written again")


@pytest.mark.usefixtures("owner")
def test_unpin_reports_a_block_that_could_not_be_read_and_stays_pinned(
    mooncake_master: MooncakeMaster, namespace: Namespace, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_pool(mooncake_master.config(global_segment_size=0), namespace, PROMPT)
    where = [*pool(mooncake_master), "--namespace", namespace.digest]
    before = count_pins(mooncake_master)
    assert kvstore("pin", *where).status == 0
    read = MooncakeStore.get

    def lose_lease(store: MooncakeStore, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        """Fail as with Mooncake's LEASE_EXPIRED: the read took longer than the lease of the block."""
        return [Status.FAILED, *read(store, keys, values)[1:]]

    with monkeypatch.context() as patched:
        patched.setattr(MooncakeStore, "get", lose_lease)
        ended = kvstore("unpin", *where)
    assert (ended.status, count_pins(mooncake_master)) == (1, before + 1)
    assert ended.output.splitlines()[0].endswith("unpinned (1 could not be read or written)")
    assert ended.sentence.startswith("not all blocks were unpinned: some could not be read")
    assert kvstore("unpin", *where).status == 0
    assert count_pins(mooncake_master) == before


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A master that separates tenants: quiet and loud have quotas of 20 MiB each, of 64 MiB."""
    folder = tmp_path_factory.mktemp("tenants")
    quotas = folder / "quotas.yaml"
    quotas.write_text(
        f"version: 1\ntenants:\n  - name: quiet\n    quota: {20 * MIB}\n  - name: loud\n    quota: {20 * MIB}\n"
    )
    flags = ["--default_kv_lease_ttl=200", "--enable_multi_tenants=true", f"--tenant_quota_connector_uri={quotas}"]
    with running_mooncake_master(folder / "log", *flags) as master:
        yield master


def test_many_puts_of_one_tenant_evict_only_its_own_blocks(tenants: MooncakeMaster, kvstore: Commands) -> None:
    quiet, loud = (Announcing(open_store(tenants.config(tenant_id=name))) for name in ("quiet", "loud"))
    memory = Memory(MIB)
    hot = [f"hot-{i}" for i in range(16)]
    assert all(quiet.put(hot, [memory.value] * len(hot)))
    many = [f"many-{i}" for i in range(160)]

    def put_all() -> bool:
        statuses = [loud.put([key], [memory.value])[0] for key in many]
        return statuses.count(Status.OK) > 100

    wait_until(put_all, "many puts to succeed", 60)
    assert quiet.exists(hot) == [Status.OK] * len(hot)
    assert loud.exists(hot) == [Status.ABSENT] * len(hot)

    where = pool(tenants)
    accounts = kvstore("stats", *where, "--json").json["tenants"]
    assert accounts["quiet"] == {
        "name": "quiet",
        "quota": 20 * MIB,
        "granted": 20 * MIB,
        "used": 16 * MIB,
        "evicted": 0,
        "refused": 0,
    }
    assert accounts["loud"]["evicted"] >= 100 * MIB
    assert "quiet" in kvstore("stats", *where).output

    keys = fill_pool(tenants.config(global_segment_size=0, tenant_id="quiet"), space("one"), PROMPT)
    digest = keys[0].split("-")[1]
    assert "cannot be listed; give a namespace" in kvstore("ls", *where, "--tenant", "quiet").sentence
    prefix = ["--namespace", digest, "--tokens", ",".join(map(str, PROMPT))]
    [row] = kvstore("ls", *where, "--tenant", "quiet", *prefix, "--json").json["prefixes"]
    assert row["found"] == 3
    [row] = kvstore("ls", *where, "--tenant", "loud", *prefix, "--block-size", "4", "--json").json["prefixes"]
    assert row["found"] == 0
    assert "3 blocks" in kvstore("pin", *where, "--tenant", "quiet", *prefix).output
    assert kvstore("clear", *where, "--tenant", "loud", "--all").output == "0 blocks removed of all namespaces\n"
    assert kvstore("clear", *where, "--tenant", "quiet", "--all").output == "3 blocks removed of all namespaces\n"
    assert quiet.exists(hot) == [Status.OK] * len(hot)
    quiet.close()
    loud.close()


def test_doctor_reports_a_tenant_without_a_quota(tenants: MooncakeMaster, kvstore: Commands) -> None:
    findings = kvstore("doctor", *pool(tenants, tenant_id="nobody"), "--json")
    assert "the master knows no tenant 'nobody'" in findings.output
