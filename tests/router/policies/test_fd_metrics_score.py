"""fd_metrics_score and fd_remote_metrics_score: whose account of the load counts."""

from __future__ import annotations

from router.policies import InstanceLoad, PolicyOptions, RequestFeatures
from router.policies.fd_metrics_score import FdMetricsScore, FdRemoteMetricsScore

REQUEST = RequestFeatures(100)


def test_the_remote_score_counts_waiting_requests_by_their_weight() -> None:
    policy = FdRemoteMetricsScore(PolicyOptions(waiting_weight=10))
    busy, waited = InstanceLoad("busy", running=9, waiting=0), InstanceLoad("waited", running=0, waiting=1)
    assert policy.choose_instance(REQUEST, [busy, waited]).reasons == {
        "policy": "fd_remote_metrics_score",
        "score": 9,
    }


def test_the_remote_score_adds_what_was_sent_since_the_instance_was_asked() -> None:
    policy = FdRemoteMetricsScore()
    stale, other = InstanceLoad("stale", requests=8, running=0, waiting=0), InstanceLoad("other", running=5, waiting=0)
    assert policy.choose_instance(REQUEST, [stale, other]).key == "other"


def test_the_remote_score_of_an_unknown_instance_is_what_the_router_sent() -> None:
    policy = FdRemoteMetricsScore()
    unknown, known = InstanceLoad("unknown", requests=3), InstanceLoad("known", running=4, waiting=0)
    assert policy.choose_instance(REQUEST, [unknown, known]).key == "unknown"


def test_the_local_score_is_what_the_router_sent() -> None:
    busy, waited = InstanceLoad("busy", requests=2), InstanceLoad("waited", requests=1, running=9, waiting=9)
    decision = FdMetricsScore().choose_instance(REQUEST, [busy, waited])
    assert (decision.key, decision.reasons) == ("waited", {"policy": "fd_metrics_score", "score": 1})
