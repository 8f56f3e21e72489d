"""Kubernetes manifests as ``kubectl kustomize`` renders them, and what is asked of each in the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_lines import expand_variables

__all__ = ["KUBERNETES", "Manifest", "containers_of", "environment_of", "list_pods", "named", "render"]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
Manifest = dict[str, Any]

# Where a pod's own figures come from, and what they may be.
_FIELDS = {"status.podIP": "10.0.0.1", "metadata.name": "etcd-0"}
_WORKLOADS = ("Deployment", "StatefulSet")


def render(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization; skips the test where there is no kubectl that knows components."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed (Debian's kubernetes-client)")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    if done.returncode and re.search(r'unknown field "(components|labels)"', done.stderr):
        pytest.skip("this kubectl is older than 1.24, whose kustomize knows no components")
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return list(yaml.load_all(done.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of this kind and name."""
    (found,) = (each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def list_pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pods' templates, by the names of the workloads that make them."""
    return {each["metadata"]["name"]: each["spec"]["template"] for each in manifests if each["kind"] in _WORKLOADS}


def containers_of(pod: Manifest) -> Iterator[tuple[Manifest, list[str], Mapping[str, str]]]:
    """Each container with its command line and its environment, as the kubelet expands them."""
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        environ = environment_of(container)
        words = [*container.get("command", []), *container.get("args", [])]
        yield container, [expand_variables(str(word), environ) for word in words], environ


def environment_of(container: Manifest) -> dict[str, str]:
    """The container's variables."""
    return {
        each["name"]: each["value"] if "value" in each else _FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container.get("env", [])
    }
