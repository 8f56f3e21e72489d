"""Pod: a pod and its instance, read from labels, annotations and state of the pod.

=============================== ======================================================================================
label ``kvrouter/role``         mixed, prefill or decode; else llm-d's ``llm-d.ai/role``, or the first of ``role``,
                                ``component`` (SGLang's guides) and ``model`` (vLLM production-stack) that has a role
label ``kvrouter/engine``       fastdeploy, vllm, sglang or openai; else llm-d's ``llm-d.ai/engine-type``
annotation                      a JSON object with further fields of a registration, such as ``port``,
``kvrouter/registration``       ``connector_port`` or ``kv_connector``
annotation                      the bootstrap port of a prefill instance of SGLang
``sglang.ai/bootstrap-port``
=============================== ======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvcommon.json_objects import load_object

__all__ = ["READY", "TERMINATING", "UNREADY", "Pod", "read_pod"]

READY, UNREADY, TERMINATING = "ready", "not_ready", "terminating"

_ROLES = {
    "mixed": "mixed",
    "both": "mixed",
    "prefill-decode": "mixed",
    "prefill": "prefill",
    "decode": "decode",
}
_OWN_ROLE_LABEL = "kvrouter/role"
_ROLE_LABELS = ("llm-d.ai/role", "role", "component", "model")
_OWN_ENGINE_LABEL = "kvrouter/engine"
_ENGINE_LABEL = "llm-d.ai/engine-type"
_ENGINES = {"vllm": "vllm", "sglang": "sglang"}
_REGISTRATION = "kvrouter/registration"
_BOOTSTRAP_PORT = "sglang.ai/bootstrap-port"
_PORT_NAME = "http"


class Pod(NamedTuple):
    """A pod, and the registration fields of its instance."""

    name: str
    """Namespace and name of the pod, separated by ``/``."""
    state: str
    """State of the pod: ``READY``, ``UNREADY`` or ``TERMINATING``."""
    fields: Mapping[str, Any]
    """Fields of the instance's registration. ``role`` and ``engine`` are missing if the pod does not specify them."""
    trouble: str = ""
    """Why the instance cannot be registered, in one sentence; ``""`` if it can."""


def read_pod(document: Mapping[str, Any], port: int) -> Pod:
    """Parse the description of a pod from the API server.

    Args:
        document: the description.
        port: the port of the instance; 0 if the pod specifies it.
    """
    metadata, status = _get_object(document, "metadata"), _get_object(document, "status")
    name = f"{metadata.get('namespace')}/{metadata.get('name')}"
    labels, annotations = _get_object(metadata, "labels"), _get_object(metadata, "annotations")
    fields: dict[str, Any] = {"pod": name, "host_ip": status.get("podIP"), "start_id": _name_process(metadata, status)}
    trouble = ""
    if found := port or _find_port(_get_object(document, "spec")):
        fields["port"] = found
    if role := _find_role(labels):
        fields["role"] = role
    if engine := labels.get(_OWN_ENGINE_LABEL) or _ENGINES.get(str(labels.get(_ENGINE_LABEL))):
        fields["engine"] = engine
    if bootstrap_port := annotations.get(_BOOTSTRAP_PORT):
        fields["bootstrap_port"] = bootstrap_port
    if text := annotations.get(_REGISTRATION):
        registration = load_object(text)
        fields.update(registration or {})
        if registration is None:
            trouble = f"its annotation {_REGISTRATION} is {text!r}; it must be a JSON object"
    if not trouble and "port" not in fields:
        trouble = (
            f"it has no known port: name a port {_PORT_NAME!r}, annotate the pod with {_REGISTRATION}: "
            f"'{{\"port\": 8000}}', or "
            "use --service-discovery-port"
        )
    return Pod(name, _find_state(metadata, status), fields, trouble)


def _find_state(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if metadata.get("deletionTimestamp"):
        return TERMINATING
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in _list(status, "conditions"))
    return READY if ready and status.get("podIP") else UNREADY


def _name_process(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return a name of the instance's process. It changes with each start of the pod's containers."""
    restarts = sum(int(each.get("restartCount") or 0) for each in _list(status, "containerStatuses"))
    return f"{metadata.get('uid')}-{restarts}"


def _find_role(labels: Mapping[str, Any]) -> str:
    """Return the role that the pod's labels specify; ``""`` if they specify none.

    An invalid value of the label ``kvrouter/role`` is returned unchanged.
    """
    if own := labels.get(_OWN_ROLE_LABEL):
        return _ROLES.get(str(own), str(own))
    return next((_ROLES[value] for label in _ROLE_LABELS if (value := labels.get(label)) in _ROLES), "")


def _find_port(spec: Mapping[str, Any]) -> int:
    """Return the pod's port with the name ``http``, or else the pod's only port; 0 if the pod has neither."""
    ports = [port for container in _list(spec, "containers") for port in _list(container, "ports")]
    named = [port for port in ports if port.get("name") == _PORT_NAME]
    chosen = named or (ports if len(ports) == 1 else [])
    return int(chosen[0].get("containerPort") or 0) if chosen else 0


def _get_object(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _list(document: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    return (each for each in document.get(name) or () if isinstance(each, dict))
