"""The watch of the pods of a selector, at a mock of the API server (``tests.support.kubernetes``)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.fleet.discovery.pod_watch import PodWatch
from router.settings import RouterSettings, SettingsError
from tests.router.stand_in import LoopThread
from tests.support.certificates import make_certificate
from tests.support.kubernetes import KubernetesApi, make_pod
from tests.support.waiting import wait_until


class Watching:
    """A watch in a loop of another thread, and the mock of the API server."""

    def __init__(self, thread: LoopThread, api: KubernetesApi) -> None:
        self.api = api
        self.changes = 0
        settings = RouterSettings(
            service_discovery="kubernetes",
            selector=("app=kv",),
            kubernetes_api=api.url,
            kubernetes_account=str(api.account),
        )
        self.watch = PodWatch(settings, self._on_change)
        self._thread = thread
        self._task: asyncio.Future[None] | None = None

    def start(self) -> None:
        async def start() -> None:
            self._task = asyncio.ensure_future(self.watch.keep_current())

        self._thread.run(start())

    def stop(self) -> None:
        async def stop() -> None:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])

        self._thread.run(stop())
        self.api.stop()

    def names(self) -> list[str]:
        return sorted(name.removeprefix("ns/") for name in self.watch.pods)

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: self.names() == list(names) and not self.watch.trouble, f"the pods {names}")

    def wait_for_watch(self) -> None:
        wait_until(lambda: self.api.num_watchers == 1, "a watch")

    def _on_change(self) -> None:
        self.changes += 1


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.discovery.pod_watch.FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("router.fleet.discovery.pod_watch.LAST_PAUSE_SECONDS", 0.1)


@pytest.fixture
def watching(thread: LoopThread, tmp_path: Path) -> Iterator[Watching]:
    """A watch over HTTPS with one pod."""
    api = KubernetesApi(tmp_path / "account", make_certificate(tmp_path))
    api.put(make_pod("a"))
    made = Watching(thread, api)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def plain(thread: LoopThread, tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    """A function that makes watches over plain HTTP."""
    started: list[Watching] = []

    def make(page: int = 1000) -> Watching:
        started.append(Watching(thread, KubernetesApi(tmp_path / "account", page=page)))
        return started[-1]

    yield make
    for each in started:
        each.stop()


def test_pods_are_added_changed_and_removed(watching: Watching) -> None:
    watching.wait_for("a")
    watching.wait_for_watch()
    watching.api.put(make_pod("b"))
    watching.wait_for("a", "b")
    watching.api.put(make_pod("b", ready=False))
    wait_until(lambda: watching.watch.pods["ns/b"].state == "not_ready", "the change")
    watching.api.delete("a")
    watching.wait_for("b")
    assert (watching.api.lists, watching.api.watches) == (1, 1)


def test_a_watch_that_ends_continues_at_its_last_version(watching: Watching) -> None:
    watching.wait_for("a")
    watching.wait_for_watch()
    watching.api.end_watches()
    watching.wait_for_watch()
    watching.api.put(make_pod("b"))
    watching.wait_for("a", "b")
    assert watching.api.lists == 1


def test_a_bookmark_updates_the_version_of_the_watch(watching: Watching) -> None:
    watching.wait_for_watch()
    watching.api.forget_history()
    watching.api.send_bookmark()
    changes = watching.changes
    watching.api.end_watches()
    watching.wait_for_watch()
    assert (watching.api.lists, watching.changes) == (1, changes)


def test_a_watch_with_a_version_that_is_too_old_lists_the_pods_again(watching: Watching) -> None:
    watching.wait_for_watch()
    watching.api.put(make_pod("b"))
    watching.wait_for("a", "b")
    watching.api.forget_history()
    watching.api.end_watches()
    wait_until(lambda: watching.api.lists == 2, "another list")
    watching.wait_for_watch()
    watching.api.delete("a")
    watching.wait_for("b")


def test_pods_that_were_deleted_meanwhile_are_removed(watching: Watching, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.fleet.discovery")
    watching.wait_for("a")
    watching.wait_for_watch()
    watching.api.stop()
    wait_until(lambda: watching.watch.trouble, "the trouble")
    assert watching.names() == ["a"]
    watching.api.put(make_pod("b"))
    watching.api.delete("a")
    watching.api.forget_history()
    time.sleep(0.3)  # several attempts
    lines = [line for line in caplog.messages if "known pods stay registered; trying again" in line]
    assert len(lines) == 1
    watching.api.start()
    watching.wait_for("b")
    wait_until(lambda: "responds again" in caplog.text, "the log line")


def test_a_list_is_read_in_pages(plain: Callable[..., Watching]) -> None:
    made = plain(page=2)
    for name in "abcde":
        made.api.put(make_pod(name))
    made.start()
    made.wait_for(*"abcde")
    assert made.api.lists == 3


def test_the_token_is_read_again(watching: Watching) -> None:
    watching.wait_for_watch()
    watching.api.token = "renewed"
    (watching.api.account / "token").write_text("renewed")
    watching.api.end_watches()
    watching.wait_for_watch()
    assert not watching.watch.trouble


def test_a_refusal_is_logged_with_its_reason_and_a_remedy(
    plain: Callable[..., Watching], caplog: pytest.LogCaptureFixture
) -> None:
    made = plain()
    made.api.refuses = 403
    made.start()
    wait_until(lambda: "answered with 403" in caplog.text, "the refusal")
    assert "is told to refuse; the router's service account must be allowed to list and watch pods" in caplog.text
    made.api.refuses = 0
    made.wait_for()


@pytest.mark.parametrize("event", [{"type": "ADDED"}, {"type": "ERROR", "object": {"code": 500, "message": "boom"}}])
def test_a_wrong_event_causes_a_new_list(watching: Watching, event: dict[str, object]) -> None:
    watching.wait_for_watch()
    watching.api.end_watches(last=event)
    wait_until(lambda: watching.api.lists == 2, "another list")
    watching.wait_for("a")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "manager.kubernetes-account .*/token cannot be read: No such file"),
        ({"kubernetes_api": "localhost:1"}, "manager.kubernetes-api is 'localhost:1'; it must be https://HOST:PORT"),
        ({"kubernetes_api": "https://h:0"}, "it must be https://HOST:PORT, with no path"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    made = RouterSettings(
        service_discovery="k8s", selector=("app=kv",), **{"kubernetes_account": str(tmp_path), **settings}
    )
    with pytest.raises(SettingsError, match=message):
        PodWatch(made, lambda: None)
