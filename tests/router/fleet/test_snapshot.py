"""The snapshot: a restarted router restores it, and does not use a damaged or foreign one."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.fleet.registration import Registration, Role
from router.fleet.registry import Registry
from router.fleet.snapshot import STALE_SECONDS, Snapshot
from router.settings import SettingsError
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.support.waiting import wait_until


class DumpingPolicy:
    """A policy with only the methods that a snapshot uses."""

    def __init__(self, learned: bytes = b"") -> None:
        self.learned = learned

    def dump(self) -> bytes:
        return self.learned

    def load_dump(self, data: bytes) -> None:
        if data == b"\x00damaged":
            raise ValueError("it is damaged")
        self.learned = data


def mixed(port: int, **fields: Any) -> Registration:
    return Registration.from_fields({"role": "mixed", "host_ip": "10.0.0.1", "port": port, **fields})


def snapshot(
    path: Path, registry: Registry | None = None, policy: object | None = None, at: float = 1000.0
) -> Snapshot:
    return Snapshot(path, registry or Registry(splitwise=False), {Role.MIXED: policy}, lambda: at, lambda: ("", 0.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot"


def test_instances_are_restored_with_their_registrations_but_as_unhealthy(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    for _ in range(2):
        before.register(mixed(1, version="v", gpu="H800", engine="vllm", kv_connector="kvstore"), now=0.0)
    before.register(mixed(2), now=0.0).set_draining(True)
    snapshot(path, before).save()
    snapshot(path, after).restore(now=50.0)
    first, second = after
    assert (first.registration, first.has_heartbeat, first.state) == (
        mixed(1, version="v", gpu="H800", engine="vllm", kv_connector="kvstore"),
        True,
        "unhealthy",
    )
    assert (second.draining, second.has_heartbeat) == (True, False)
    first.record_passed_probe(51.0, threshold=5)
    assert (first.state, first.weight(51.0)) == ("healthy", 1.0)


def test_an_operators_orders_are_restored(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0).set_pause(True)
    before.register(mixed(2), now=0.0).set_share(0.25)
    before.register(mixed(3), now=0.0).set_draining(True, until_restart=True)
    snapshot(path, before).save()
    snapshot(path, after).restore(now=50.0)
    assert [(each.paused, each.share) for each in after] == [(True, 1.0), (False, 0.25), (False, 1.0)]
    assert [each.drains_until_restart for each in after] == [False, False, True]


def test_orders_from_other_routers_replace_those_of_the_file(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0).set_draining(True)
    snapshot(path, before).save()
    reported = after.add_known_instance(mixed(1), now=0.0, permanent=False)
    snapshot(path, after).restore(now=0.0)
    assert not reported.draining


def test_a_file_of_an_earlier_version_has_no_pause_and_no_weight(path: Path) -> None:
    entry = {"registration": dict(mixed(1).fields), "has_heartbeat": True, "permanent": False, "draining": True}
    path.write_bytes(orjson.dumps({**GOOD, "instances": [entry], "policies": {}}))
    registry = Registry(splitwise=False)
    snapshot(path, registry).restore(now=0.0)
    assert [(each.draining, each.paused, each.share) for each in registry] == [(True, False, 1.0)]


@pytest.mark.parametrize(
    "damage", [{"weight": 2}, {"weight": -1}, {"weight": None}, {"weight": "x"}, {"ordered": ["x", 1]}], ids=str
)
def test_a_file_with_a_wrong_weight_or_version_of_orders_is_not_used(
    path: Path, caplog: pytest.LogCaptureFixture, damage: dict[str, object]
) -> None:
    flags = {"has_heartbeat": True, "permanent": False, "draining": True}
    entry = {"registration": dict(mixed(1).fields), **flags, **damage}
    path.write_bytes(orjson.dumps({**GOOD, "instances": [entry], "policies": {}}))
    registry = Registry(splitwise=False)
    snapshot(path, registry).restore(now=0.0)
    assert "the router starts without the snapshot " in caplog.text
    assert not list(registry)


def test_a_restored_instance_with_heartbeats_is_removed_if_it_sends_no_more(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    for _ in range(2):
        before.register(mixed(1), now=0.0)
    snapshot(path, before).save()
    snapshot(path, after).restore(now=50.0)
    assert after.forget_silent(now=80.0, expiry=30.0) == []
    assert len(after.forget_silent(now=81.0, expiry=30.0)) == 1


def test_the_current_register_file_replaces_the_registrations_of_the_snapshot(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    for port in (1, 2):
        before.add_known_instance(mixed(port), now=0.0, permanent=True).set_draining(True)
    snapshot(path, before).save()
    expected = after.add_known_instance(mixed(1, version="new"), now=0.0, permanent=True)
    snapshot(path, after).restore(now=0.0)
    assert list(after) == [expected]
    assert (expected.registration.version, expected.draining) == ("new", True)


@given(learned=st.binary())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_policy_gets_its_own_dump(path: Path, learned: bytes) -> None:
    snapshot(path, policy=DumpingPolicy(learned)).save()
    policy = DumpingPolicy()
    snapshot(path, policy=policy).restore(now=0.0)
    assert policy.learned == learned


def test_a_policy_does_not_get_the_dump_of_another_policy(path: Path) -> None:
    class Other(DumpingPolicy):
        pass

    snapshot(path, policy=Other(b"x")).save()
    policy = DumpingPolicy()
    snapshot(path, policy=policy).restore(now=0.0)
    assert policy.learned == b""


def test_a_policy_without_a_dump_is_ignored(path: Path) -> None:
    snapshot(path, policy=object()).save()
    snapshot(path, policy=DumpingPolicy()).restore(now=0.0)


def test_a_policys_damaged_dump_does_not_prevent_the_restore(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    snapshot(path, before, DumpingPolicy(b"\x00damaged")).save()
    snapshot(path, after, DumpingPolicy()).restore(now=0.0)
    assert len(list(after)) == 1
    assert "the mixed policy starts without its state in the snapshot" in caplog.text
    assert ": it is damaged" in caplog.text


def test_a_policys_failure_does_not_prevent_the_restore(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(DumpingPolicy):
        def load_dump(self, data: bytes) -> None:
            struct.unpack("<I", data[:1])

    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    snapshot(path, before, Fails(b"forged")).save()
    snapshot(path, after, Fails()).restore(now=0.0)
    assert len(list(after)) == 1
    assert "the mixed policy starts without its state in the snapshot" in caplog.text


def test_only_its_user_can_read_the_file_and_writing_follows_no_symbolic_link(path: Path, tmp_path: Path) -> None:
    other, new = tmp_path / "other", path.with_name(path.name + ".new")
    other.write_text("another's")
    new.symlink_to(other)
    snapshot(path).save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.is_symlink()
    assert not new.exists()
    assert other.read_text() == "another's"


def test_the_file_is_flushed_before_it_replaces_the_previous_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        done.append("flush")
        fsync(descriptor)

    def note_replace(old: Path, new: Path) -> None:
        done.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    snapshot(path).save()
    assert done == ["flush", "replace", "flush"]


@pytest.mark.parametrize(
    ("boot", "since_boot", "is_used"), [("a", 1600.0, True), ("a", 1601.0, False), ("b", 5.0, False)]
)
def test_its_age_is_measured_with_the_time_since_boot_and_after_a_reboot_with_the_clock(
    path: Path, boot: str, since_boot: float, is_used: bool
) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    Snapshot(path, before, {}, lambda: 5000.0, lambda: ("a", 1000.0)).save()
    Snapshot(path, after, {}, lambda: 0.0, lambda: (boot, since_boot)).restore(now=0.0)
    assert bool(list(after)) is is_used


def test_instances_with_roles_that_the_router_does_not_accept_are_ignored(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1, role="prefill"), now=0.0)
    before.register(mixed(2), now=0.0)
    snapshot(path, before).save()
    snapshot(path, after).restore(now=0.0)
    assert [each.key for each in after] == [mixed(2).key]


def test_a_first_start_without_a_file_logs_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot(path).restore(now=0.0)
    assert caplog.text == ""


GOOD: dict[str, Any] = {"format": "kvrouter snapshot 1", "written_at": 1000.0, "splitwise": False, "instances": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is damaged"),
        (b"\x00\xff", "it is damaged"),
        (b"[]", "it is damaged"),
        (orjson.dumps(GOOD), "it is damaged: 'policies'"),
        (orjson.dumps({**GOOD, "format": "2"}), "its format is '2'"),
        (orjson.dumps({**GOOD, "policies": {}, "splitwise": True}), "a router with --splitwise has written it"),
        (orjson.dumps({**GOOD, "policies": {}, "written_at": 999.0 - STALE_SECONDS}), "it was written 601 s ago"),
        (orjson.dumps({**GOOD, "policies": {}, "written_at": 2000.0}), "it was written -1000 s ago"),
        (orjson.dumps({**GOOD, "policies": {}, "written_at": "x"}), "it is damaged"),
        (orjson.dumps({**GOOD, "policies": {"mixed": {"policy": "A", "data": "!"}}}), "it is damaged"),
        (orjson.dumps({**GOOD, "policies": {"nobody": {}}}), "'nobody' is not a valid Role"),
        (orjson.dumps({**GOOD, "policies": {}, "instances": [{"registration": {}}]}), "it is damaged: host_ip"),
    ],
)
def test_an_unusable_snapshot_is_ignored_with_one_log_line(
    path: Path, caplog: pytest.LogCaptureFixture, content: bytes, message: str
) -> None:
    path.write_bytes(content)
    registry = Registry(splitwise=False)
    snapshot(path, registry).restore(now=0.0)
    assert list(registry) == []
    (record,) = caplog.records
    assert message in record.getMessage()


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_of_the_file_prevents_a_start(path: Path, damage: bytes, at: int) -> None:
    before = Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    snapshot(path, before, DumpingPolicy(b"learned")).save()
    data = path.read_bytes()
    path.write_bytes(data[:at] + damage + data[at + len(damage) :])
    snapshot(path, policy=DumpingPolicy()).restore(now=0.0)


def test_a_file_that_is_no_snapshot_is_renamed_not_replaced(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("words")
    keeper = snapshot(path)
    keeper.restore(now=0.0)
    keeper.save()
    renamed = path.with_name(path.name + ".other")
    assert renamed.read_text() == "words"
    assert f"; the file was renamed to {renamed}" in caplog.text
    path.write_bytes(path.read_bytes()[:40])
    keeper.restore(now=0.0)  # a damaged snapshot may be replaced
    assert renamed.read_text() == "words"
    path.write_text("more words")
    keeper.restore(now=0.0)
    assert (renamed.read_text(), renamed.with_name(renamed.name + "1").read_text()) == ("words", "more words")


def test_a_failure_to_write_is_logged_and_leaves_no_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = snapshot(path)
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        keeper.save()
    assert "cannot be written: Is a directory" in caplog.text
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_missing_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no folder"):
        snapshot(tmp_path / "nowhere" / "snapshot")


def test_a_path_that_is_not_a_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="which is a folder; it must be a file"):
        snapshot(tmp_path)
    with pytest.raises(SettingsError, match="which is a device or a pipe; it must be a file"):
        snapshot(Path("/dev/null"))


def test_a_restarted_router_serves_before_the_first_heartbeat(
    path: Path, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    options = {"splitwise": True, "snapshot_path": str(path), "snapshot_interval_secs": 0.05}
    first = make_router(prefill, decode, **options)
    wait_until(lambda: path.exists() and path.read_bytes().count(b"host_ip") == 2, "the snapshot to be written")
    first.stop()
    second = make_router(**options)
    wait_until(lambda: second.chat().status_code == 200, "an answer")


def test_an_order_is_saved_at_once(path: Path, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in(), snapshot_path=str(path), snapshot_interval_secs=1000.0)
    (instance,) = router.app.registry
    for order, written in (("drain", b'"draining":true'), ("pause", b'"paused":true')):
        assert router.client.post(f"/admin/{order}", json={"instance": instance.key}).status_code == 200

        def is_written(sign: bytes = written) -> bool:
            return path.exists() and sign in path.read_bytes()

        wait_until(is_written, f"the {order} in the snapshot")


def test_a_router_saves_its_snapshot_when_it_stops(path: Path, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in(), snapshot_path=str(path))
    router.stop()
    wait_until(lambda: path.exists() and b"host_ip" in path.read_bytes(), "the snapshot to be written")


def test_policies_are_encoded_in_another_thread(path: Path) -> None:
    encoded_by: list[threading.Thread] = []

    class Slow(DumpingPolicy):
        def dump(self) -> bytes:
            encoded_by.append(threading.current_thread())
            return b"slow"

    async def until_written() -> None:
        writing = asyncio.ensure_future(snapshot(path, policy=Slow()).keep_writing(0.01))
        while not path.exists():
            await asyncio.sleep(0.01)
        writing.cancel()

    asyncio.run(asyncio.wait_for(until_written(), 10))
    assert encoded_by
    assert threading.main_thread() not in encoded_by


class Blocking(DumpingPolicy):
    """A policy that is encoded when ``released`` is set."""

    def __init__(self) -> None:
        super().__init__(b"learned")
        self.encoding = threading.Event()
        self.released = threading.Event()

    def dump(self) -> bytes:
        self.encoding.set()
        assert self.released.wait(10)
        return b"learned"


def test_a_save_waits_for_the_previous_one(path: Path) -> None:
    policy = Blocking()
    keeper = snapshot(path, policy=policy)

    async def cancel_during_save() -> threading.Thread:
        writing = asyncio.ensure_future(keeper.keep_writing(0.0))
        assert await asyncio.to_thread(policy.encoding.wait, 10)
        writing.cancel()
        policy.encoding.clear()
        last = threading.Thread(target=keeper.save)
        last.start()
        assert not policy.encoding.wait(0.2)
        policy.released.set()
        return last

    asyncio.run(cancel_during_save()).join()
    assert policy.encoding.is_set()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_unexpected_failure_is_logged_and_the_next_save_is_tried(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Flawed(DumpingPolicy):
        def dump(self) -> bytes:
            if not caplog.records:
                raise RuntimeError("a flaw")
            return super().dump()

    async def until_written() -> None:
        writing = asyncio.ensure_future(snapshot(path, policy=Flawed()).keep_writing(0.01))
        while not path.exists():
            await asyncio.sleep(0.01)
        writing.cancel()

    asyncio.run(asyncio.wait_for(until_written(), 10))
    assert "cannot be written" in caplog.text
    assert "a flaw" in caplog.text
