"""Settings: flags > YAML > environment > defaults, and one sentence for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.settings import RouterSettings, SettingsError, load_settings


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults_are_fastdeploys() -> None:
    settings = load_settings([], {})
    assert (settings.host, settings.port, settings.splitwise) == ("0.0.0.0", 9000, False)
    assert settings.request_timeout_secs == 1800
    assert (settings.policy, settings.prefill_policy, settings.decode_policy) == (
        "request_num",
        "process_tokens",
        "request_num",
    )


def test_one_failed_probe_does_not_make_an_instance_unhealthy() -> None:
    assert RouterSettings().health_failure_threshold > 1


def test_every_setting_can_be_a_flag() -> None:
    settings = load_settings(["--port", "52700", "--splitwise", "--decode-policy=random", "--log-level", "debug"], {})
    assert (settings.port, settings.splitwise, settings.decode_policy, settings.log_level) == (
        52700,
        True,
        "random",
        "debug",
    )


def test_underscores_in_flags_are_taken_as_fastdeploy_does() -> None:
    assert load_settings(["--request_timeout_secs", "60"], {}).request_timeout_secs == 60.0


def test_the_go_routers_yaml_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "config.yaml",
        """
server: {port: "8080", host: 127.0.0.1, splitwise: true}
scheduler: {policy: random, prefill-policy: round_robin, decode-policy: process_tokens}
manager:
  health-failure-threshold: 2
  health-success-threshold: 2
  health-check-timeout-secs: 1
  health-check-interval-secs: 0.5
  health-check-endpoint: /ready
log: {level: warn}
""",
    )
    settings = load_settings(["--config_path", path], {})
    assert settings == RouterSettings(
        host="127.0.0.1",
        port=8080,
        splitwise=True,
        policy="random",
        prefill_policy="round_robin",
        decode_policy="process_tokens",
        health_failure_threshold=2,
        health_success_threshold=2,
        health_check_timeout_secs=1.0,
        health_check_interval_secs=0.5,
        health_check_endpoint="/ready",
        log_level="warn",
    )


def test_a_flag_wins_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "server: {port: 2, host: 127.0.0.2}")
    environ = {"KVROUTER__PORT": "1", "KVROUTER__HOST": "127.0.0.1", "KVROUTER__SPLITWISE": "true"}
    settings = load_settings(["--port", "3", "--config-path", path], environ)
    assert (settings.port, settings.host, settings.splitwise) == (3, "127.0.0.2", True)


def test_what_kubernetes_sets_beside_a_service_named_kvrouter_is_left_alone() -> None:
    assert load_settings([], {"KVROUTER_PORT": "tcp://10.0.0.1:9000"}).port == 9000


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n"])
def test_an_empty_file_or_section_sets_nothing(tmp_path: Path, text: str) -> None:
    assert load_settings(["--config-path", write(tmp_path / "c.yaml", text)], {}) == RouterSettings()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--splitwize"], "--splitwize is not a flag of the router; did you mean --splitwise?"),
        (["--port", "x"], "--port is 'x'; it must be a whole number"),
        (["--port"], "--port: expected one argument"),
        (["--port", "70000"], "server.port is 70000; a port is at most 65535"),
        (["--policy", "round_robbin"], "scheduler.policy is 'round_robbin'; it must be one of"),
        (["--policy", "round_robbin"], "did you mean round_robin?"),
        (["--request-timeout-secs", "0"], "server.request-timeout-secs is 0; it must be more than 0 seconds"),
        (["--health-failure-threshold", "0"], "manager.health-failure-threshold is 0; it must be at least 1"),
        (["--health-check-endpoint", "health"], "'health'; a path begins with '/'"),
        (["--max-queued-requests", "-1"], "server.max-queued-requests is -1; it must be at least 0"),
        (["--queue-timeout-secs", "0"], "server.queue-timeout-secs is 0; it must be more than 0 seconds"),
        (["--max-concurrent-requests-per-key", "4"], "there are no keys to tell clients apart"),
        (["--config-path", "/no/such/file"], "--config_path /no/such/file: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_one_sentence(argv: list[str], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(argv, {})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server: {prot: 1}", "server.prot is not a setting of the router; did you mean server.port?"),
        ("scheduler: {prefil-policy: random}", "did you mean scheduler.prefill-policy?"),
        ("servre: {port: 1}", "'servre' is not a section of settings; did you mean server?"),
        ("server: 5", "server is 5; it must be a section with settings under it"),
        ("server: {port: [1]}", "server.port is [1]; it must be a whole number"),
        ("server: {port: true}", "server.port is True; it must be a whole number"),
        ("server: {splitwise: 'maybe'}", "server.splitwise is 'maybe'; it must be true or false"),
        ("manager: {health-check-timeout-secs: soon}", "it must be a number"),
        ("[1, 2]", "has no sections"),
        ("server: {port: 1", "is not YAML"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_the_key(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "config.yaml", text)
    with pytest.raises(SettingsError) as refused:
        load_settings(["--config-path", path], {})
    assert said in str(refused.value)
    assert path in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVROUTER__PROT", "1", "KVROUTER__PROT is no setting of the router; did you mean KVROUTER__PORT?"),
        ("KVROUTER__PORT", "x", "environment variable KVROUTER__PORT is 'x'; it must be a whole number"),
    ],
)
def test_a_wrong_environment_variable_is_one_sentence(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings([], {name: value})
    assert said in str(refused.value)
