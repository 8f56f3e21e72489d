"""Reading the registration of an instance from its pod."""

from __future__ import annotations

from typing import Any

import pytest

from router.fleet.discovery.pods import read_pod
from tests.support.kubernetes import make_pod


def fields_of(port: int = 0, **changes: Any) -> dict[str, Any]:
    pod = read_pod(make_pod("a", "10.0.0.1", **changes), port)
    assert not pod.trouble
    return dict(pod.fields)


def test_a_pod_without_labels_has_only_its_name_address_and_start_id() -> None:
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
        ({"kvrouter/role": "perfill"}, "perfill"),  # the registration is refused later
    ],
)
def test_its_role_is_from_our_label_or_from_common_labels_of_others(labels: dict[str, str], role: str | None) -> None:
    assert fields_of(labels=labels).get("role") == role


@pytest.mark.parametrize(
    ("labels", "engine"),
    [
        ({"kvrouter/engine": "openai"}, "openai"),
        ({"llm-d.ai/engine-type": "vllm"}, "vllm"),
        ({"llm-d.ai/engine-type": "trtllm-serve"}, None),
    ],
)
def test_its_engine_is_from_our_label_or_from_llm_ds(labels: dict[str, str], engine: str | None) -> None:
    assert fields_of(labels=labels).get("engine") == engine


def test_annotations_can_set_further_fields() -> None:
    fields = fields_of(
        annotations={"kvrouter/registration": '{"port": 7000, "tp_size": 4}', "sglang.ai/bootstrap-port": "8999"}
    )
    assert (fields["port"], fields["tp_size"], fields["bootstrap_port"]) == (7000, 4, "8999")


def test_the_port_is_from_the_setting_or_named_http_or_the_only_one() -> None:
    assert fields_of(port=9000)["port"] == 9000
    document = make_pod("a")
    ports = document["spec"]["containers"][0]["ports"]
    ports.append({"name": "metrics", "containerPort": 9100})
    assert read_pod(document, 0).fields["port"] == 8000
    del ports[0]
    assert read_pod(document, 0).fields["port"] == 9100
    ports.append({"containerPort": 9200})
    assert "it has no known port: name a port 'http'" in read_pod(document, 0).trouble


def test_an_annotation_that_is_not_an_object_is_an_error() -> None:
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
def test_a_terminating_pod_is_not_ready(changes: dict[str, Any], state: str) -> None:
    assert read_pod(make_pod("a", **changes), 0).state == state


@pytest.mark.parametrize("document", [{}, {"metadata": None, "spec": None, "status": None}, make_pod("a", ip="")])
def test_a_pod_without_an_address_is_not_ready(document: dict[str, Any]) -> None:
    assert read_pod(document, 0).state == "not_ready"


def test_a_restarted_container_is_another_process() -> None:
    assert fields_of(restarts=0)["start_id"] != fields_of(restarts=1)["start_id"]
