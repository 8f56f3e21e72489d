"""RouterSettings: the default values and the bounds."""

from __future__ import annotations

import pytest

from router.policies import PolicyOptions
from router.settings import RouterSettings, SettingsError


def test_one_failed_probe_does_not_make_an_instance_unhealthy() -> None:
    assert RouterSettings().health_failure_threshold > 1


def test_the_defaults_of_policies_are_those_of_policy_options() -> None:
    assert RouterSettings().policy_options == PolicyOptions()


def test_a_preempted_request_is_continued_three_times_by_default() -> None:
    assert (RouterSettings().preempt_retry_count, RouterSettings().preempt_retry_exclude_decode) == (3, False)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("port", 65536, "server.port is 65536; it must be a port, 1 to 65535, or 0 for any free port"),
        ("policy", "randon", "scheduler.policy is 'randon'; it must be one of"),
        ("policy", "randon", "did you mean random?"),
        ("shutdown_grace_secs", 0.0, "server.shutdown-grace-secs is 0; it must be a number of seconds above 0"),
        ("target_utilization", 1.5, "scheduler.target-utilization is 1.5; it must be a fraction above 0 and at most 1"),
        ("requests_per_instance", 0, "scheduler.requests-per-instance is 0; it must be at least 1"),
        ("service_discovery", "k9s", "did you mean k8s?"),
        ("service_discovery", "kubernetes", "but no pods are selected; set manager.selector"),
        ("selector", ("app=kv",), "manager.selector is 'app=kv', but service discovery is off"),
        ("service_discovery_port", 65536, "it must be a port, 1 to 65535, or 0 for the port that the pod names"),
        ("request_timeout_secs", 0.0, "server.request-timeout-secs is 0; it must be a number of seconds above 0"),
        ("eviction_duration_mins", 0.0, "it must be a number of minutes above 0"),
        ("waiting_weight", float("inf"), "scheduler.waiting-weight is inf; it must be 0 or more"),
        ("workers", 99999999, "server.workers is 99999999; it must be at most 1024"),
        ("max_queued_requests", -1, "server.max-queued-requests is -1; it must be at least 0"),
        ("prefix_index_entries", 1, "scheduler.prefix-index-entries is 1; it must be at least 2"),
        ("health_check_endpoint", "health", "manager.health-check-endpoint is 'health'; a path begins with '/'"),
        (
            "cors_allowed_origins",
            ("chat.example.com",),
            "server.cors-allowed-origins has 'chat.example.com'; an origin",
        ),
        ("cors_allowed_origins", ("https://a.example/",), "is scheme://host or scheme://host:port without a path"),
        ("cors_allowed_origins", ("https://*.example",), "has 'https://*.example'"),
        ("session_headers", ("x chat",), "session-headers has 'x chat'; an entry is the header of the session's id"),
        ("session_headers", ("a:b:c",), "scheduler.session-headers has 'a:b:c'"),
        ("model_alias", ("chat",), "server.model-alias has 'chat'; an alias is NAME=MODEL, such as chat=Qwen3-8B"),
        ("model_alias", ("=m",), "server.model-alias has '=m'"),
        ("model_alias", ("a=m", "a=n"), "server.model-alias has the alias 'a' twice, for 'm' and for 'n'"),
        (
            "model_alias",
            ("a=m", "b=a"),
            "the alias 'b' is for 'a', which is another alias; name the model",
        ),
        ("ssl_keyfile", "key.pem", "server.ssl-keyfile is 'key.pem', but no certificate is given"),
        ("max_concurrent_requests_per_key", 1, "but clients have no API keys"),
    ],
)
def test_the_error_for_a_wrong_value_is_one_sentence_with_the_key(setting: str, value: object, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        RouterSettings(**{setting: value})  # type: ignore[arg-type]
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("port", [0, 1, 65535])
def test_every_port_and_0_are_accepted(port: int) -> None:
    assert RouterSettings(port=port).port == port


@pytest.mark.parametrize("seconds", [5.0, 1.0])
def test_with_a_shared_state_heartbeats_must_expire_after_the_detection_of_a_dead_router(seconds: float) -> None:
    message = (
        "manager.heartbeat-expiry-secs is .*; with server.shared-state it must be more than 5, the time after which"
    )
    with pytest.raises(SettingsError, match=message):
        RouterSettings(shared_state="redis://127.0.0.1:6379/0", heartbeat_expiry_secs=seconds)
    assert RouterSettings(heartbeat_expiry_secs=seconds).heartbeat_expiry_secs == seconds
    assert RouterSettings(shared_state="redis://127.0.0.1:6379/0", heartbeat_expiry_secs=5.1).heartbeat_expiry_secs
