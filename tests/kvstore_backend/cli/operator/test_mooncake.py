"""The operator's commands on real Mooncake pools: what only a master and its tenants can do."""

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
    """Gives the shared pool its memory while these tests run."""
    opened = open_store(mooncake_master.config())
    yield opened
    opened.close()


@pytest.fixture
def namespace() -> Namespace:
    """One of the test's own: the pool is shared."""
    return space(secrets.token_hex(8))


def pool(master: MooncakeMaster, **changes: object) -> list[str]:
    """The arguments that name a master's pool; its clients give no memory."""
    changes = {"global_segment_size": 0, **changes}
    return [url(master, **changes), "--master-metrics", master.metrics_url.split("/")[2]]


def kept_keys(master: MooncakeMaster) -> float:
    """How many keys the master keeps from eviction now."""
    return MasterAdmin(master.metrics_url.split("/")[2]).fetch_metrics()["master_soft_pin_key_count"]


@pytest.mark.usefixtures("owner")
def test_blocks_are_listed_pinned_and_removed(
    mooncake_master: MooncakeMaster, namespace: Namespace, kvstore: Commands
) -> None:
    keys = fill_pool(mooncake_master.config(global_segment_size=0), namespace, PROMPT)
    there = pool(mooncake_master)
    named = ["--namespace", namespace.digest]
    [row] = kvstore("ls", *there, *named, "--json").told["namespaces"]
    assert (row["blocks"], row["bytes"], row["manifest"]["facts"]["name"]) == (3, 3 * 1128, namespace.model)

    before = kept_keys(mooncake_master)
    assert kvstore("pin", *there, *named, "--dry-run").output.startswith("3 blocks of namespace")
    assert kept_keys(mooncake_master) == before
    assert "3 blocks" in kvstore("pin", *there, *named, "--for", "1h").output
    assert kept_keys(mooncake_master) == before + 3
    assert "1 blocks" in kvstore("unpin", *there, *named, "--tokens", "0,1,2,3").output
    assert kept_keys(mooncake_master) == before + 2
    nothing = kvstore("pin", *there, *named, "--tokens", "9,9,9,9")
    assert nothing.sentence == "the pool has none of the selected blocks, or they are damaged, so nothing is pinned"
    assert nothing.output == f"0 blocks of namespace {namespace.digest} pinned (1 not in the pool)\n"
    assert kvstore("unpin", *there, *named, "--tokens", "9,9,9,9").status == 0
    assert kvstore("pin", *there, *named, "--for", "9" * 400).status == 2
    assert kvstore("pin", *there, *named, "--for", "999999999d").sentence.startswith("not all blocks were pinned: ")
    elsewhere = kvstore("ls", there[0], "--master-metrics", "127.0.0.1:1").sentence
    assert elsewhere.startswith("no master answers with its metrics at 127.0.0.1:1; correct --master-metrics, ")
    too_long = kvstore("pin", *there, *named, "--for", "30d")
    assert (too_long.status, too_long.output.splitlines()[0]) == (
        1,
        f"0 blocks of namespace {namespace.digest} pinned (3 could not be read or written)",
    )
    assert "--for is longer than the master allows" in too_long.sentence
    [prefix] = kvstore("ls", *there, *named, "--tokens", "0 1 2 3 4 5 6 7", "--json").told["prefixes"]
    assert (prefix["found"], prefix["blocks"]) == (2, 2)
    assert kvstore("clear", *there, *named, "--tokens", "0,1,2,3").output.startswith("1 blocks removed")
    assert kvstore("clear", *there, *named).output.startswith("2 blocks removed")
    left = set(MasterAdmin(there[-1]).stream_keys())
    assert not left & set(keys)


@pytest.mark.usefixtures("owner")
def test_all_blocks_of_a_tenant_are_not_those_of_all_tenants(
    mooncake_master: MooncakeMaster, namespace: Namespace, kvstore: Commands
) -> None:
    there = pool(mooncake_master)
    keys = [
        key
        for tenant in ("a", "b")
        for key in fill_pool(mooncake_master.config(global_segment_size=0, tenant_id=tenant), namespace, PROMPT)
    ]
    ended = kvstore("clear", *there, "--tenant", "a", "--all")
    assert ended.sentence.startswith("the master does not separate tenants, so --all would remove the blocks of all")
    assert set(keys) <= set(MasterAdmin(there[-1]).stream_keys())
    assert kvstore("clear", *there, "--tenant", "a", "--namespace", keys[0].split("-")[1]).status == 0
    assert set(keys) & set(MasterAdmin(there[-1]).stream_keys()) == set(keys[3:])


def test_a_damaged_block_is_not_written_again(
    mooncake_master: MooncakeMaster, owner: StorageBackend, namespace: Namespace, kvstore: Commands
) -> None:
    [key, *_] = fill_pool(mooncake_master.config(global_segment_size=0), namespace, PROMPT[:4])
    assert owner.remove([key], force=True) == [Status.OK]
    memory = Memory(b"something else")
    assert owner.put([key], [memory.value]) == [Status.OK]
    ended = kvstore("pin", *pool(mooncake_master), "--namespace", namespace.digest, "--json")
    assert ended.status == 1
    told = json.loads(ended.output)["namespaces"]
    assert told == {namespace.digest: {"done": 0, "absent": 0, "damaged": 1, "failed": 0}}
    ended = kvstore("unpin", *pool(mooncake_master), "--namespace", namespace.digest)
    assert (ended.status, ended.sentence.partition(",")[0]) == (1, "damaged blocks are not written again")


@pytest.mark.usefixtures("owner")
def test_a_pin_of_a_block_that_could_not_be_read_stays_and_unpin_says_so(
    mooncake_master: MooncakeMaster, namespace: Namespace, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_pool(mooncake_master.config(global_segment_size=0), namespace, PROMPT)
    there = [*pool(mooncake_master), "--namespace", namespace.digest]
    before = kept_keys(mooncake_master)
    assert kvstore("pin", *there).status == 0
    read = MooncakeStore.get

    def lose_lease(store: MooncakeStore, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        """Mooncake's LEASE_EXPIRED: the read took longer than the block is protected."""
        return [Status.FAILED, *read(store, keys, values)[1:]]

    with monkeypatch.context() as patched:
        patched.setattr(MooncakeStore, "get", lose_lease)
        ended = kvstore("unpin", *there)
    assert (ended.status, kept_keys(mooncake_master)) == (1, before + 1)
    assert ended.output.splitlines()[0].endswith("unpinned (1 could not be read or written)")
    assert ended.sentence.startswith("not all blocks were unpinned: some could not be read")
    assert kvstore("unpin", *there).status == 0
    assert kept_keys(mooncake_master) == before


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A master that keeps tenants apart: quiet and loud may have 20 MiB each, of 64."""
    folder = tmp_path_factory.mktemp("tenants")
    quotas = folder / "quotas.yaml"
    quotas.write_text(
        f"version: 1\ntenants:\n  - name: quiet\n    quota: {20 * MIB}\n  - name: loud\n    quota: {20 * MIB}\n"
    )
    flags = ["--default_kv_lease_ttl=200", "--enable_multi_tenants=true", f"--tenant_quota_connector_uri={quotas}"]
    with running_mooncake_master(folder / "log", *flags) as master:
        yield master


def test_a_flood_of_one_tenant_evicts_only_its_own_blocks(tenants: MooncakeMaster, kvstore: Commands) -> None:
    quiet, loud = (Announcing(open_store(tenants.config(tenant_id=name))) for name in ("quiet", "loud"))
    memory = Memory(MIB)
    hot = [f"hot-{i}" for i in range(16)]
    assert all(quiet.put(hot, [memory.value] * len(hot)))
    flood = [f"flood-{i}" for i in range(160)]

    def put_all() -> bool:
        statuses = [loud.put([key], [memory.value])[0] for key in flood]
        return statuses.count(Status.OK) > 100

    wait_until(put_all, "a flood to be taken", 60)
    assert quiet.exists(hot) == [Status.OK] * len(hot)
    assert loud.exists(hot) == [Status.ABSENT] * len(hot)

    there = pool(tenants)
    accounts = kvstore("stats", *there, "--json").told["tenants"]
    assert accounts["quiet"] == {
        "name": "quiet",
        "quota": 20 * MIB,
        "granted": 20 * MIB,
        "used": 16 * MIB,
        "evicted": 0,
        "refused": 0,
    }
    assert accounts["loud"]["evicted"] >= 100 * MIB
    assert "quiet" in kvstore("stats", *there).output

    keys = fill_pool(tenants.config(global_segment_size=0, tenant_id="quiet"), space("one"), PROMPT)
    digest = keys[0].split("-")[1]
    assert "cannot be listed; give a namespace" in kvstore("ls", *there, "--tenant", "quiet").sentence
    prefix = ["--namespace", digest, "--tokens", ",".join(map(str, PROMPT))]
    [row] = kvstore("ls", *there, "--tenant", "quiet", *prefix, "--json").told["prefixes"]
    assert row["found"] == 3
    [row] = kvstore("ls", *there, "--tenant", "loud", *prefix, "--block-size", "4", "--json").told["prefixes"]
    assert row["found"] == 0
    assert "3 blocks" in kvstore("pin", *there, "--tenant", "quiet", *prefix).output
    assert kvstore("clear", *there, "--tenant", "loud", "--all").output == "0 blocks removed of all namespaces\n"
    assert kvstore("clear", *there, "--tenant", "quiet", "--all").output == "3 blocks removed of all namespaces\n"
    assert quiet.exists(hot) == [Status.OK] * len(hot)
    quiet.close()
    loud.close()


def test_a_tenant_without_a_quota_is_told_so(tenants: MooncakeMaster, kvstore: Commands) -> None:
    findings = kvstore("doctor", *pool(tenants, tenant_id="nobody"), "--json")
    assert "the master knows no tenant 'nobody'" in findings.output
