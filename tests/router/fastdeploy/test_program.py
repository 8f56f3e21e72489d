"""FastDeploy's tests of the rest of its Go router: the middleware around each request, the log, and the metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest

from router.launch.logs import open_log
from router.settings import RouterSettings
from tests.router.conftest import RouterUnderTest
from tests.router.fastdeploy.origins import translates
from tests.router.stand_in import StandIn
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

MIDDLEWARE = "golang_router/internal/middleware"
LOGGER = "golang_router/pkg/logger/logger_test.go"
METRICS = "golang_router/pkg/metrics/metrics_test.go"


class TestAroundEachRequest:
    """Access log, failures of the router's own, and counts."""

    @translates(f"{MIDDLEWARE}/logger_test.go", "TestLoggerMiddleware")
    @translates(LOGGER, "TestContextPrefix")
    def test_a_request_is_logged_with_its_id(
        self, go_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
    ) -> None:
        log = tmp_path / "access.log"
        router = go_router(stand_in(), access_log=str(log))
        assert router.chat(request_id="test-uuid-123").status_code == 200
        wait_until(lambda: log.read_text().endswith("\n"), "the line")
        line = json.loads(log.read_text())
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
        assert line["request_id"] == "test-uuid-123"

    @translates(f"{MIDDLEWARE}/logger_test.go", "TestRecoveryMiddleware")
    def test_a_mistake_of_the_router_is_a_500(self, go_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
        router = go_router()
        monkeypatch.delattr(router.app, "registry")
        answer = router.client.get("/registered")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "router_error")

    @translates(f"{MIDDLEWARE}/metrics_test.go", "TestMetricsMiddleware")
    def test_a_request_is_counted_and_its_answer_is_not_changed(
        self, go_router: MakeRouter, stand_in: MakeStandIn
    ) -> None:
        instance = stand_in()
        router = go_router(instance)
        assert router.chat().json()["choices"][0]["message"]["content"] == "hello"
        counted = 'http_requests_total{endpoint="/v1/chat/completions",method="POST",status_code="200"} 1.0'
        wait_until(lambda: counted in router.client.get("/metrics").text, "the count")


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    """The root of all loggers, without handlers; all is as before when the test is over."""
    loggers = [logging.getLogger(name) for name in (None, "router", "uvicorn")]
    root, levels = loggers[0], [logger.level for logger in loggers]
    handlers, root.handlers = root.handlers, []
    yield root
    opened, root.handlers = root.handlers, handlers
    for handler in opened:
        if isinstance(handler, RotatingFileHandler):  # the others are not ours
            handler.close()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("root_log")
class TestLog:
    """Where the log goes, and what is in it."""

    @translates(LOGGER, "TestLoggerInit")
    def test_it_goes_to_standard_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        open_log(RouterSettings(log_level="debug", log_output="stdout"))
        logging.getLogger("router.test").info("started")
        assert "started" in capsys.readouterr().out

    @translates(LOGGER, "TestLoggerInit")
    def test_it_goes_to_a_file_in_the_folder_logs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        open_log(RouterSettings(log_level="debug", log_output="file"))
        logging.getLogger("router.test").info("started")
        assert "started" in (tmp_path / "logs" / "router.log").read_text()

    @pytest.mark.parametrize("level", ["debug", "info", "warn", "error"])
    @translates(LOGGER, "TestLogLevels")
    def test_each_level_has_itself_and_all_above_it(self, level: str, capsys: pytest.CaptureFixture[str]) -> None:
        open_log(RouterSettings(log_level=level, log_output="stdout"))
        log, levels = logging.getLogger("router.test"), ["debug", "info", "warn", "error"]
        for name in levels:
            log.log(getattr(logging, name.upper()), "%s message", name)
        written = capsys.readouterr().out
        assert [name for name in levels if f"{name} message" in written] == levels[levels.index(level) :]

    @translates(LOGGER, "TestLogFunctions")
    def test_a_line_has_its_values(self, capsys: pytest.CaptureFixture[str]) -> None:
        open_log(RouterSettings(log_level="debug", log_output="stdout"))
        logging.getLogger("router.test").info("test %s", "message")
        assert "test message" in capsys.readouterr().out


class TestMetrics:
    """Families that Prometheus finds before there was a request."""

    @pytest.mark.parametrize(
        "name", ["http_requests_total", "inference_requests_total", "http_request_duration_seconds"]
    )
    @translates(METRICS, "TestMetricsInitialization")
    def test_they_are_there_from_the_start(self, go_router: MakeRouter, name: str) -> None:
        assert f"# TYPE {name} " in go_router().client.get("/metrics").text

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("http_requests_total", "Total number of HTTP requests"),
            ("inference_requests_total", "Total number of inference requests"),
        ],
    )
    @translates(METRICS, "TestMetricsHelpText")
    def test_they_are_explained(self, go_router: MakeRouter, name: str, said: str) -> None:
        assert f"# HELP {name} {said}" in go_router().client.get("/metrics").text
