"""The snapshot: what a restarted router has from its predecessor, and what it does with one it cannot use."""

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


class Remembers:
    """A policy, as far as a snapshot cares, that has learned something."""

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


def test_instances_come_back_as_they_registered_but_unproven(path: Path) -> None:
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


def test_an_operators_orders_outlive_the_router(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0).set_pause(True)
    before.register(mixed(2), now=0.0).set_share(0.25)
    before.register(mixed(3), now=0.0).set_draining(True, until_restart=True)
    snapshot(path, before).save()
    snapshot(path, after).restore(now=50.0)
    assert [(each.paused, each.share) for each in after] == [(True, 1.0), (False, 0.25), (False, 1.0)]
    assert [each.drains_until_restart for each in after] == [False, False, True]


def test_orders_of_which_other_routers_have_told_are_later_than_the_files(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0).set_draining(True)
    snapshot(path, before).save()
    told = after.add_known_instance(mixed(1), now=0.0, permanent=False)
    snapshot(path, after).restore(now=0.0)
    assert not told.draining


def test_a_file_of_an_earlier_version_has_no_pause_and_no_weight(path: Path) -> None:
    entry = {"registration": dict(mixed(1).fields), "has_heartbeat": True, "permanent": False, "draining": True}
    path.write_bytes(orjson.dumps({**GOOD, "instances": [entry], "policies": {}}))
    registry = Registry(splitwise=False)
    snapshot(path, registry).restore(now=0.0)
    assert [(each.draining, each.paused, each.share) for each in registry] == [(True, False, 1.0)]


@pytest.mark.parametrize(
    "damage", [{"weight": 2}, {"weight": -1}, {"weight": None}, {"weight": "x"}, {"ordered": ["x", 1]}], ids=str
)
def test_a_file_with_an_impossible_weight_or_version_of_orders_is_left_aside(
    path: Path, caplog: pytest.LogCaptureFixture, damage: dict[str, object]
) -> None:
    flags = {"has_heartbeat": True, "permanent": False, "draining": True}
    entry = {"registration": dict(mixed(1).fields), **flags, **damage}
    path.write_bytes(orjson.dumps({**GOOD, "instances": [entry], "policies": {}}))
    registry = Registry(splitwise=False)
    snapshot(path, registry).restore(now=0.0)
    assert "is not used: " in caplog.text
    assert not list(registry)


def test_an_instance_that_sent_heartbeats_is_forgotten_if_it_sends_no_more(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    for _ in range(2):
        before.register(mixed(1), now=0.0)
    snapshot(path, before).save()
    snapshot(path, after).restore(now=50.0)
    assert after.forget_silent(now=80.0, expiry=30.0) == []
    assert len(after.forget_silent(now=81.0, expiry=30.0)) == 1


def test_what_the_register_file_says_now_counts(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    for port in (1, 2):
        before.add_known_instance(mixed(port), now=0.0, permanent=True).set_draining(True)
    snapshot(path, before).save()
    kept = after.add_known_instance(mixed(1, version="new"), now=0.0, permanent=True)
    snapshot(path, after).restore(now=0.0)
    assert list(after) == [kept]
    assert (kept.registration.version, kept.draining) == ("new", True)


@given(learned=st.binary())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_policy_gets_back_what_it_dumped(path: Path, learned: bytes) -> None:
    snapshot(path, policy=Remembers(learned)).save()
    policy = Remembers()
    snapshot(path, policy=policy).restore(now=0.0)
    assert policy.learned == learned


def test_what_another_policy_dumped_is_not_given_to_this_one(path: Path) -> None:
    class Other(Remembers):
        pass

    snapshot(path, policy=Other(b"x")).save()
    policy = Remembers()
    snapshot(path, policy=policy).restore(now=0.0)
    assert policy.learned == b""


def test_a_policy_that_remembers_nothing_is_left_alone(path: Path) -> None:
    snapshot(path, policy=object()).save()
    snapshot(path, policy=Remembers()).restore(now=0.0)


def test_a_damaged_memory_does_not_cost_the_instances(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    snapshot(path, before, Remembers(b"\x00damaged")).save()
    snapshot(path, after, Remembers()).restore(now=0.0)
    assert len(list(after)) == 1
    assert "of the mixed policy in the snapshot" in caplog.text
    assert "is not used: it is damaged" in caplog.text


def test_a_memory_that_fails_in_an_unforeseen_way_ends_no_start(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Remembers):
        def load_dump(self, data: bytes) -> None:
            struct.unpack("<I", data[:1])

    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    snapshot(path, before, Fails(b"forged")).save()
    snapshot(path, after, Fails()).restore(now=0.0)
    assert len(list(after)) == 1
    assert "of the mixed policy in the snapshot" in caplog.text


def test_it_is_readable_to_its_user_alone_and_nothing_that_stands_in_its_way_is_followed(
    path: Path, tmp_path: Path
) -> None:
    other, new = tmp_path / "other", path.with_name(path.name + ".new")
    other.write_text("another's")
    new.symlink_to(other)
    snapshot(path).save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.is_symlink()
    assert not new.exists()
    assert other.read_text() == "another's"


def test_it_is_on_the_disk_before_it_takes_the_place_of_the_last_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ("boot", "since_boot", "taken"), [("a", 1600.0, True), ("a", 1601.0, False), ("b", 5.0, False)]
)
def test_its_age_is_told_by_no_clock_that_may_be_set_if_the_machine_was_not_started_since(
    path: Path, boot: str, since_boot: float, taken: bool
) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    Snapshot(path, before, {}, lambda: 5000.0, lambda: ("a", 1000.0)).save()
    Snapshot(path, after, {}, lambda: 0.0, lambda: (boot, since_boot)).restore(now=0.0)
    assert bool(list(after)) is taken


def test_instances_of_roles_that_the_router_does_not_take_are_left_out(path: Path) -> None:
    before, after = Registry(splitwise=False), Registry(splitwise=False)
    before.register(mixed(1, role="prefill"), now=0.0)
    before.register(mixed(2), now=0.0)
    snapshot(path, before).save()
    snapshot(path, after).restore(now=0.0)
    assert [each.key for each in after] == [mixed(2).key]


def test_no_file_is_a_first_start_and_says_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot(path).restore(now=0.0)
    assert caplog.text == ""


GOOD: dict[str, Any] = {"format": "kvrouter snapshot 1", "written_at": 1000.0, "splitwise": False, "instances": []}


@pytest.mark.parametrize(
    ("content", "said"),
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
def test_one_that_cannot_be_used_is_left_aside_with_one_line(
    path: Path, caplog: pytest.LogCaptureFixture, content: bytes, said: str
) -> None:
    path.write_bytes(content)
    registry = Registry(splitwise=False)
    snapshot(path, registry).restore(now=0.0)
    assert list(registry) == []
    (record,) = caplog.records
    assert said in record.getMessage()


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_to_the_file_keeps_the_router_from_starting(path: Path, damage: bytes, at: int) -> None:
    before = Registry(splitwise=False)
    before.register(mixed(1), now=0.0)
    snapshot(path, before, Remembers(b"learned")).save()
    data = path.read_bytes()
    path.write_bytes(data[:at] + damage + data[at + len(damage) :])
    snapshot(path, policy=Remembers()).restore(now=0.0)


def test_a_file_of_others_is_not_replaced(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("words")
    keeper = snapshot(path)
    keeper.restore(now=0.0)
    keeper.save()
    aside = path.with_name(path.name + ".other")
    assert aside.read_text() == "words"
    assert f"; it is now {aside}" in caplog.text
    path.write_bytes(path.read_bytes()[:40])
    keeper.restore(now=0.0)  # a damaged snapshot may be replaced
    assert aside.read_text() == "words"
    path.write_text("more words")
    keeper.restore(now=0.0)
    assert (aside.read_text(), aside.with_name(aside.name + "1").read_text()) == ("words", "more words")


def test_one_that_cannot_be_written_is_said_and_does_no_harm(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = snapshot(path)
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        keeper.save()
    assert "cannot be written: Is a directory" in caplog.text
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_folder_that_is_not_there_is_one_sentence_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no folder"):
        snapshot(tmp_path / "nowhere" / "snapshot")


def test_a_path_that_is_a_folder_is_one_sentence_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="which is a folder; it must be a file"):
        snapshot(tmp_path)
    with pytest.raises(SettingsError, match="which is a device or a pipe; it must be a file"):
        snapshot(Path("/dev/null"))


def test_a_restarted_router_serves_before_any_heartbeat(
    path: Path, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    options = {"splitwise": True, "snapshot_path": str(path), "snapshot_interval_secs": 0.05}
    first = make_router(prefill, decode, **options)
    wait_until(lambda: path.exists() and path.read_bytes().count(b"host_ip") == 2, "the snapshot to be written")
    first.stop()
    second = make_router(**options)
    wait_until(lambda: second.chat().status_code == 200, "an answer")


def test_an_order_is_written_at_once(path: Path, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in(), snapshot_path=str(path), snapshot_interval_secs=1000.0)
    (instance,) = router.app.registry
    for order, written in (("drain", b'"draining":true'), ("pause", b'"paused":true')):
        assert router.client.post(f"/admin/{order}", json={"instance": instance.key}).status_code == 200

        def is_written(sign: bytes = written) -> bool:
            return path.exists() and sign in path.read_bytes()

        wait_until(is_written, f"the {order} in the snapshot")


def test_a_router_that_stops_writes_it(path: Path, make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in(), snapshot_path=str(path))
    router.stop()
    wait_until(lambda: path.exists() and b"host_ip" in path.read_bytes(), "the snapshot to be written")


def test_what_policies_remember_is_encoded_while_requests_go_on(path: Path) -> None:
    encoded_by: list[threading.Thread] = []

    class Slow(Remembers):
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


class Blocking(Remembers):
    """Its memory is encoded only once it is released."""

    def __init__(self) -> None:
        super().__init__(b"learned")
        self.encoding = threading.Event()
        self.released = threading.Event()

    def dump(self) -> bytes:
        self.encoding.set()
        assert self.released.wait(10)
        return b"learned"


def test_one_writing_ends_before_the_next_begins(path: Path) -> None:
    policy = Blocking()
    keeper = snapshot(path, policy=policy)

    async def cancelled_while_it_writes() -> threading.Thread:
        writing = asyncio.ensure_future(keeper.keep_writing(0.0))
        assert await asyncio.to_thread(policy.encoding.wait, 10)
        writing.cancel()
        policy.encoding.clear()
        last = threading.Thread(target=keeper.save)
        last.start()
        assert not policy.encoding.wait(0.2)
        policy.released.set()
        return last

    asyncio.run(cancelled_while_it_writes()).join()
    assert policy.encoding.is_set()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_unexpected_failure_is_logged_and_the_next_writing_tried(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Flawed(Remembers):
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
