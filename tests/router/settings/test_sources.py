"""load_settings: flags > YAML > environment > defaults, and one sentence for each error."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest
import yaml

from router.policies import PolicyOptions
from router.settings import RouterSettings, SettingsError, load_settings, sources
from router.settings.router_settings import SETTINGS


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults_are_fastdeploys() -> None:
    settings = load_settings([], {})
    assert (settings.host, settings.port, settings.splitwise) == ("0.0.0.0", 9000, False)
    assert settings.request_timeout_secs == 1800
    assert (settings.policy, settings.prefill_policy, settings.decode_policy) == (
        "pool_aware",
        "pool_aware",
        "request_num",
    )


def test_every_setting_can_be_a_flag() -> None:
    settings = load_settings(["--port", "52700", "--splitwise", "--decode-policy=random", "--log-level", "debug"], {})
    assert (settings.port, settings.splitwise, settings.decode_policy, settings.log_level) == (
        52700,
        True,
        "random",
        "debug",
    )


@pytest.mark.parametrize(
    "flags", [["http://a", "http://b:1"], ["http://a,http://b:1"], ["http://a, http://b:1"]], ids=["two", "one", "text"]
)
def test_a_list_is_several_arguments_or_one_with_commas(flags: list[str], tmp_path: Path) -> None:
    flag = ["--cors-allowed-origins", *flags]
    assert load_settings([*flag, "--port", "1"], {}).cors_allowed_origins == ("http://a", "http://b:1")
    variable = {"KVROUTER__CORS_ALLOWED_ORIGINS": ",".join(flags)}
    assert load_settings([], variable).cors_allowed_origins == ("http://a", "http://b:1")
    file = write(tmp_path / "config.yaml", f"server: {{cors-allowed-origins: {json.dumps(flags)}}}")
    assert load_settings(["--config_path", file], {}).cors_allowed_origins == ("http://a", "http://b:1")


# With a file or command of the Go router, these defaults are as in the Go router.
GO_DEFAULTS = RouterSettings(dialect="go", load_balance_weight=1.0, waiting_weight=1.0)
ALIASES = ["chat=Qwen/Qwen3-8B", "small=a=b"]


@pytest.mark.parametrize(
    "flags", [["app=kv,tier=gpu"], ["app=kv", "tier=gpu"], ["app=kv,", "tier=gpu"]], ids=["one", "words", "both"]
)
def test_a_selector_is_one_text_or_several(flags: list[str]) -> None:
    settings = load_settings(["--service-discovery", "kubernetes", "--selector", *flags], {})
    assert ",".join(settings.selector) == "app=kv,tier=gpu"


def test_a_selector_with_sets_is_not_changed(tmp_path: Path) -> None:
    settings = load_settings(["--service-discovery", "k8s", "--selector", "app in (a, b),tier=gpu"], {})
    assert settings.selector == ("app in (a, b),tier=gpu",)
    path = write(tmp_path / "a.yaml", "manager: {service-discovery: kubernetes, selector: {app: kv, tier: gpu}}")
    assert load_settings(["--config-path", path], {}).selector == ("app=kv", "tier=gpu")


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "https://kubernetes.default.svc"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://10.96.0.1:6443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1"}, "https://[fd00::1]:443"),
    ],
)
def test_the_address_of_the_api_server_is_from_kubernetes(environ: dict[str, str], url: str) -> None:
    assert load_settings([], environ).kubernetes_api == url
    assert load_settings(["--kubernetes-api", "http://127.0.0.1:8001"], environ).kubernetes_api == (
        "http://127.0.0.1:8001"
    )


def test_aliases_of_models_are_several_arguments_or_a_map(tmp_path: Path) -> None:
    expected = {"chat": "Qwen/Qwen3-8B", "small": "a=b"}
    repeated = [part for alias in ALIASES for part in ("--model-alias", alias)]
    assert load_settings(repeated, {}).model_aliases == expected
    assert load_settings(["--model-alias", *ALIASES], {}).model_aliases == expected
    assert load_settings([], {"KVROUTER__MODEL_ALIAS": " ".join(ALIASES)}).model_aliases == expected
    file = write(tmp_path / "config.yaml", "server: {model-alias: {chat: Qwen/Qwen3-8B, small: a=b}}")
    assert load_settings(["--config-path", file], {}).model_aliases == expected


def test_flags_can_have_underscores_as_in_fastdeploy() -> None:
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
    assert settings == dataclasses.replace(
        GO_DEFAULTS,
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


# FastDeploy's example of a configuration, from docs and golang_router/examples.
GO_ROUTERS_EXAMPLE = """
server: {port: "8080", host: "0.0.0.0", mode: "debug", splitwise: true}
scheduler:
  policy: "random"
  prefill-policy: "process_tokens"
  decode-policy: "request_num"
  eviction-interval-secs: 60
  eviction-duration-mins: 20
  balance-abs-threshold: 2
  balance-rel-threshold: 0.3
  hit-ratio-weight: 0.5
  load-balance-weight: 0.1
  cache-block-size: 64
  tokenizer-url: "http://127.0.0.1:8099"
  tokenizer-timeout-secs: 2
  waiting-weight: 5
  stats-interval-secs: 4
manager:
  health-failure-threshold: 3
  health-success-threshold: 2
  health-check-timeout-secs: 5
  health-check-interval-secs: 5
  health-check-endpoint: /health
  register-path: "config/register.yaml"
log: {level: "info", output: "file", max-age-days: 7, max-total-size-mb: 100, cleanup-interval-secs: 3600}
"""


def test_every_key_of_the_go_routers_example_is_read(tmp_path: Path) -> None:
    settings = load_settings(["--config_path", write(tmp_path / "config.yaml", GO_ROUTERS_EXAMPLE)], {})
    assert (settings.register_path, settings.log_output, settings.log_max_total_size_mb) == (
        "config/register.yaml",
        "file",
        100,
    )
    assert settings.stats_interval_secs == 4
    assert settings.policy_options == PolicyOptions(
        eviction_duration_mins=20,
        balance_abs_threshold=2,
        balance_rel_threshold=0.3,
        hit_ratio_weight=0.5,
        load_balance_weight=0.1,
        waiting_weight=5,
    )


def test_each_setting_without_effect_is_reported_in_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", GO_ROUTERS_EXAMPLE)
    sentences = load_settings(["--config_path", path], {}).without_effect
    assert [sentence.split(" has no effect: ")[0].removeprefix(f"{path}: ") for sentence in sentences] == [
        "server.mode",
        "scheduler.eviction-interval-secs",
        "scheduler.cache-block-size",
        "scheduler.tokenizer-url",
        "scheduler.tokenizer-timeout-secs",
        "log.max-age-days",
        "log.cleanup-interval-secs",
    ]


def test_unknown_settings_of_a_file_are_reported_in_one_sentence(tmp_path: Path) -> None:
    text = """
server: {prot: 1, port: 2}
scheduler: {interval-cleanup-secs: 60, kafka-brokers-and-topics: 1}
servre: {port: 3}
other: 5
"""
    path = write(tmp_path / "config.yaml", text)
    settings = load_settings(["--config_path", path], {})
    assert settings.port == 2
    assert settings.without_effect == (
        f"{path}: these are not settings of the router and have no effect: server.prot (did you mean server.port?), "
        "scheduler.interval-cleanup-secs (did you mean scheduler.stats-interval-secs?), "
        "scheduler.kafka-brokers-and-topics, servre.port (did you mean server.port?), other",
    )


# The keys for which 0, "" or nothing means the default in the Go router's ``config.Load``.
ZEROS = """
server: {name: "", port: "", host: "", mode: "", splitwise: false}
scheduler:
  policy: ""
  prefill-policy:
  decode-policy: ""
  eviction-interval-secs: 0
  eviction-duration-mins: 0
  cache-block-size: 0
  tokenizer-url: ""
  tokenizer-timeout-secs: 0
  balance-abs-threshold: 0
  balance-rel-threshold: 0.0
  hit-ratio-weight: 0
  load-balance-weight: 0
  waiting-weight: 0
  stats-interval-secs: 0
manager:
  health-failure-threshold: 0
  health-success-threshold: 0
  health-check-timeout-secs: 0
  health-check-interval-secs: 0
  health-check-endpoint: ""
  register-path: ""
log: {level: "", output: "", max-age-days: 0, max-total-size-mb: 0, cleanup-interval-secs: 0}
"""


def test_in_the_go_routers_file_zero_means_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", ZEROS)
    assert load_settings(["--config_path", path], {}) == GO_DEFAULTS


@pytest.mark.parametrize("key", sorted(sources._GO_KEYS))
def test_in_the_go_routers_file_a_key_can_be_without_a_value(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    path = write(tmp_path / "config.yaml", f"{section}:\n  {name}:\n")
    assert load_settings(["--config_path", path], {}) == GO_DEFAULTS


def test_these_are_all_settings_with_a_default_in_the_go_router() -> None:
    keys = {f"{section}.{name}" for section, entries in yaml.safe_load(ZEROS).items() for name in entries}
    assert keys == sources._GO_KEYS
    known = {field.metadata["key"] for field in SETTINGS} | sources._WITHOUT_EFFECT.keys()
    assert known >= sources._GO_KEYS
    assert {key.rpartition(".")[2] for key in known} >= sources._PROTECTING


def test_zero_in_a_setting_that_the_go_router_does_not_have_is_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "server: {stream-resume-count: 0}")
    assert load_settings(["--config_path", path], {}).stream_resume_count == 0


def test_the_go_routers_defaults_are_used_only_in_its_dialect() -> None:
    assert load_settings([], {}, dialect="go") == GO_DEFAULTS
    assert load_settings([], {}) == RouterSettings()
    assert load_settings(["--waiting-weight", "3"], {}, dialect="go").waiting_weight == 3.0


def test_the_flags_of_both_of_fastdeploys_routers_are_accepted(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "server: {host: 127.0.0.1}")
    python = load_settings(["--splitwise", "--preempt-retry-count", "5", "--preempt-retry-exclude-decode"], {})
    assert (python.preempt_retry_count, python.preempt_retry_exclude_decode) == (5, True)
    go = load_settings(["-port", "8080", "-splitwise=true", f"-config_path={path}"], {})
    assert (go.port, go.splitwise, go.host) == (8080, True, "127.0.0.1")


def test_the_file_of_fastdeploys_python_router_has_its_flags(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", 'host: 127.0.0.1\nport: "8100"\nsplitwise: true\nrequest-timeout-secs: 60\n')
    settings = load_settings(["--config", path], {})
    assert settings == RouterSettings(host="127.0.0.1", port=8100, splitwise=True, request_timeout_secs=60.0)


def test_a_flag_has_priority_over_that_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "port: 2\nhost: 127.0.0.2\nrequest_timeout_secs:\n")
    settings = load_settings(["--port", "3", f"--config={path}"], {"KVROUTER__HOST": "127.0.0.1"})
    assert (settings.port, settings.host, settings.request_timeout_secs) == (3, "127.0.0.2", 1800.0)


def test_unknown_flags_of_that_file_are_reported_in_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "prot: 2\nzzz: x\nport: 3\n")
    (sentence,) = load_settings(["--config", path], {}).without_effect
    assert sentence == (
        f"{path}: these are not settings of the router and have no effect: prot (did you mean port?), zzz"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: soon", "port is 'soon'; it must be a whole number"),
        ("api_key_file: k", "api_key_file is not a setting of the router; did you mean api-keys-file?"),
        ("[1]", "has no flags, such as 'port: 9000'"),
        ("port: {", "is not YAML"),
    ],
)
def test_the_error_for_a_wrong_value_in_that_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(SettingsError) as refused:
        load_settings(["--config", path], {})
    assert message in str(refused.value)
    assert path in str(refused.value)


def test_two_files_are_refused() -> None:
    with pytest.raises(SettingsError, match="--config and --config_path are both given"):
        load_settings(["--config", "a", "--config-path", "b"], {})


def test_a_router_that_is_not_installed_runs_from_its_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", find_nothing)
    assert load_settings(["--port", "52700"], {}).port == 52700
    with pytest.raises(SystemExit):
        load_settings(["--version"], {})
    assert capsys.readouterr().out == "kvrouter (not installed: it runs from a checkout)\n"


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings([flag], {})
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvrouter ")


def test_a_flag_has_priority_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "server: {port: 2, host: 127.0.0.2}")
    environ = {"KVROUTER__PORT": "1", "KVROUTER__HOST": "127.0.0.1", "KVROUTER__SPLITWISE": "true"}
    settings = load_settings(["--port", "3", "--config-path", path], environ)
    assert (settings.port, settings.host, settings.splitwise) == (3, "127.0.0.2", True)


def test_a_file_in_the_go_routers_form_selects_its_dialect(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "server: {port: 2}")
    assert [load_settings(argv, {}).dialect for argv in ([], ["--config_path", path])] == ["python", "go"]
    assert load_settings([], {}, dialect="go").dialect == "go"


def test_a_dialect_that_is_set_has_priority_over_the_way_of_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "server: {dialect: python}")
    assert load_settings(["--config_path", path], {}).dialect == "python"
    assert load_settings(["--config_path", path, "--dialect", "go"], {}).dialect == "go"
    assert load_settings([], {"KVROUTER__DIALECT": "python"}, dialect="go").dialect == "python"


def test_variables_of_kubernetes_for_a_service_named_kvrouter_are_ignored() -> None:
    assert load_settings([], {"KVROUTER_PORT": "tcp://10.0.0.1:9000"}).port == 9000


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n"])
def test_an_empty_file_or_section_sets_nothing(tmp_path: Path, text: str) -> None:
    assert load_settings(["--config-path", write(tmp_path / "c.yaml", text)], {}) == GO_DEFAULTS


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--splitwize"], "--splitwize is not a flag of this program; did you mean --splitwise?"),
        (["--port", "x"], "--port is 'x'; it must be a whole number"),
        (["--port"], "--port: expected one argument"),
        (["--port", "70000"], "server.port is 70000; it must be a port, 1 to 65535, or 0 for any free port"),
        (["--port", "-1"], "server.port is -1; it must be a port, 1 to 65535, or 0 for any free port"),
        (["--port", "1" * 5000], "it must be a whole number"),
        (["--policy", "round_robbin"], "scheduler.policy is 'round_robbin'; it must be one of"),
        (["--policy", "round_robbin"], "did you mean round_robin?"),
        (["--request-timeout-secs", "0"], "server.request-timeout-secs is 0; it must be a number of seconds above 0"),
        (["--health-failure-threshold", "0"], "manager.health-failure-threshold is 0; it must be at least 1"),
        (["--preempt-retry-count", "-1"], "server.preempt-retry-count is -1; it must be at least 0"),
        (["--prefix-index-entries", "1"], "scheduler.prefix-index-entries is 1; it must be at least 2"),
        (["--waiting-weight", "-1"], "scheduler.waiting-weight is -1; it must be 0 or more"),
        (["--eviction-duration-mins", "0"], "eviction-duration-mins is 0; it must be a number of minutes above 0"),
        (["--max-body-bytes", "0"], "server.max-body-bytes is 0; it must be at least 1"),
        (["--log-output", "syslog"], "log.output is 'syslog'; it must be one of stderr, stdout, file"),
        (["--splitwise=perhaps"], "--splitwise is 'perhaps'; it must be true or false"),
        (["--health-check-endpoint", "health"], "'health'; a path begins with '/'"),
        (["--max-queued-requests", "-1"], "server.max-queued-requests is -1; it must be at least 0"),
        (["--queue-timeout-secs", "0"], "server.queue-timeout-secs is 0; it must be a number of seconds above 0"),
        (["--queue-timeout-secs", "inf"], "server.queue-timeout-secs is inf; it must be a number of seconds above 0"),
        (["--max-concurrent-requests-per-key", "4"], "but clients have no API keys"),
        (["--config-path", "/no/such/file"], "--config_path /no/such/file: No such file or directory"),
    ],
)
def test_the_error_for_a_wrong_flag_is_one_sentence(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(argv, {})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "server: {api-key-file: k}",
            "server.api-key-file is not a setting of the router; did you mean server.api-keys",
        ),
        (
            "server: {admin-token: t}",
            "server.admin-token is not a setting of the router; did you mean server.admin-tok",
        ),
        ("server: {ssl-cert-file: c}", "did you mean server.ssl-certfile?"),
        ("servre: {api-keys-file: k}", "servre.api-keys-file is not a setting of the router; did you mean server.api-"),
        ("server: 5", "server is 5; it must be a section with settings under it"),
        ("server: {port: [1]}", "server.port is [1]; it must be a whole number"),
        ("server: {model-alias: {gpt: 4}}", "server.model-alias is {'gpt': 4}; it must be a map of names to models"),
        ("server: {model-alias: 4}", "server.model-alias is 4; it must be"),
        ("server: {port: true}", "server.port is True; it must be a whole number"),
        ("server: {splitwise: 'maybe'}", "server.splitwise is 'maybe'; it must be true or false"),
        ("manager: {health-check-timeout-secs: soon}", "it must be a number"),
        ("[1, 2]", "has no sections"),
        ("server: {port: 1", "is not YAML"),
        ("server:\n  port: 1\n  port: 2\n", "line 3: 'port' is given twice"),
        ("server: {port: 1}\nserver: {host: a}\n", "line 2: 'server' is given twice"),
        ("server: {port: %s}" % ("1" * 5000), "line 1 has a whole number of 5000 digits"),
        ("server: {request-timeout-secs: %s}" % ("1" * 400), "line 1 has a whole number of 400 digits"),
        ("server: {port: 0x%s}" % ("f" * 5000), "line 1 has a whole number of 5002 digits"),
        ("[" * 10_000, "its maps and lists are nested too deeply"),
        ("server: {port: 2026-13-01}", "a value in it cannot be read: month must be in 1..12"),
        ("server: {port: !!bool x}", "a value in it cannot be read"),
    ],
)
def test_the_error_for_a_wrong_file_is_one_sentence_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "config.yaml", text)
    with pytest.raises(SettingsError) as refused:
        load_settings(["--config-path", path], {})
    assert message in str(refused.value)
    assert path in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KVROUTER__PROT", "1", "KVROUTER__PROT is not a setting of the router; did you mean KVROUTER__PORT?"),
        ("KVROUTER__PORT", "x", "environment variable KVROUTER__PORT is 'x'; it must be a whole number"),
    ],
)
def test_the_error_for_a_wrong_environment_variable_is_one_sentence(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings([], {name: value})
    assert message in str(refused.value)


@pytest.mark.parametrize(("value", "level"), [("1", "debug"), ("true", "debug"), ("0", "info"), ("", "info")])
def test_fastdeploys_variable_for_debugging_sets_the_log_level(value: str, level: str) -> None:
    assert load_settings([], {"FD_DEBUG": value}).log_level == level


def test_a_log_level_that_is_set_has_priority_over_fastdeploys_variable(tmp_path: Path) -> None:
    assert load_settings([], {"FD_DEBUG": "1", "KVROUTER__LOG_LEVEL": "error"}).log_level == "error"
    assert load_settings(["--log-level", "warn"], {"FD_DEBUG": "1"}).log_level == "warn"


@pytest.mark.parametrize(
    "name",
    [
        *("register-token", "TOKEN", "API_KEYS_FILE", "apikey", "tls-cert", "auth-file", "server"),
        *("authentication", "requireAuth", "admin-password", "clientSecret"),
    ],
)
def test_a_flat_file_with_an_unknown_name_that_may_protect_the_router_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"{name}: {{api-keys-file: /k}}\n" if name == "server" else f"{name}: /k\n")
    with pytest.raises(SettingsError, match=name):
        load_settings(["--config", str(file)], {})


def test_a_setting_of_a_flat_file_can_be_given_only_once_in_any_spelling(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("admin_token_file: /k\nadmin-token-file: /z\n")
    with pytest.raises(SettingsError, match="admin-token-file is given twice"):
        load_settings(["--config", str(file)], {})


def test_a_group_within_a_group_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("server: {auth: {api-keys-file: /k}}\n")
    with pytest.raises(SettingsError, match=r"server\.auth is a group of settings"):
        load_settings(["--config-path", str(file)], {})
