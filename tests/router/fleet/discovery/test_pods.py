"""What a pod tells of the instance in it."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.discovery.pods import read_pod
from tests.support.kubernetes import make_pod


def fields_of(port: int = 0, **changes: Any) -> dict[str, Any]:
    pod = read_pod(make_pod("a", "10.0.0.1", **changes), port)
    assert not pod.trouble
    return dict(pod.fields)


def test_a_plain_pod_tells_where_it_is_and_no_more() -> None:
    assert fields_of() == {"pod": "ns/a", "host_ip": "10.0.0.1", "start_id": "uid-a-0", "port": 8000}


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"kvrouter/role": "prefill"}, "prefill"),
        ({"llm-d.ai/role": "decode"}, "decode"),
        ({"llm-d.ai/role": "both"}, "mixed"),
        ({"llm-d.ai/role": "prefill-decode"}, "mixed"),
        ({"role": "decode"}, "decode"),
        ({"component": "prefill"}, "prefill"),
        ({"model": "decode"}, "decode"),
        ({"kvrouter/role": "mixed", "role": "decode"}, "mixed"),
        ({"role": "backend", "model": "llama"}, None),
        ({"kvrouter/role": "perfill"}, "perfill"),  # which is refused with a sentence when it is registered
    ],
)
def test_its_role_is_that_of_our_label_or_of_others_usual_ones(labels: dict[str, str], role: str | None) -> None:
    assert fields_of(labels=labels).get("role") == role


@pytest.mark.parametrize(
    ("labels", "engine"),
    [
        ({"kvrouter/engine": "openai"}, "openai"),
        ({"llm-d.ai/engine-type": "vllm"}, "vllm"),
        ({"llm-d.ai/engine-type": "trtllm-serve"}, None),
    ],
)
def test_its_engine_likewise(labels: dict[str, str], engine: str | None) -> None:
    assert fields_of(labels=labels).get("engine") == engine


def test_annotations_tell_the_rest() -> None:
    told = fields_of(
        annotations={"kvrouter/registration": '{"port": 7000, "tp_size": 4}', "sglang.ai/bootstrap-port": "8999"}
    )
    assert (told["port"], told["tp_size"], told["bootstrap_port"]) == (7000, 4, "8999")


def test_the_port_is_the_settings_or_the_one_called_http_or_the_only_one() -> None:
    assert fields_of(port=9000)["port"] == 9000
    document = make_pod("a")
    ports = document["spec"]["containers"][0]["ports"]
    ports.append({"name": "metrics", "containerPort": 9100})
    assert read_pod(document, 0).fields["port"] == 8000
    del ports[0]
    assert read_pod(document, 0).fields["port"] == 9100
    ports.append({"containerPort": 9200})
    assert "it has no known port: name a port 'http'" in read_pod(document, 0).trouble


def test_an_annotation_that_is_no_object_is_told() -> None:
    pod = read_pod(make_pod("a", annotations={"kvrouter/registration": "port=1"}), 0)
    assert pod.trouble == "its annotation kvrouter/registration is 'port=1'; it must be a JSON object"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "ready"),
        ({"ready": False}, "not_ready"),
        ({"terminating": True}, "terminating"),
        ({"terminating": True, "ready": False}, "terminating"),
    ],
)
def test_it_is_ready_until_it_is_told_to_end(changes: dict[str, Any], state: str) -> None:
    assert read_pod(make_pod("a", **changes), 0).state == state


@pytest.mark.parametrize("document", [{}, {"metadata": None, "spec": None, "status": None}, make_pod("a", ip="")])
def test_a_pod_without_an_address_is_not_ready(document: dict[str, Any]) -> None:
    assert read_pod(document, 0).state == "not_ready"


def test_a_container_that_was_started_again_is_another_process() -> None:
    assert fields_of(restarts=0)["start_id"] != fields_of(restarts=1)["start_id"]
