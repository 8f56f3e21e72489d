"""Kubernetes manifests, rendered with ``kubectl kustomize``, and functions that read them."""

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

__all__ = ["KUBERNETES", "Manifest", "containers_of", "environment_of", "find_manifest", "list_pods", "render"]

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
Manifest = dict[str, Any]

# Values for the fields of a pod that a manifest may refer to.
_FIELDS = {"status.podIP": "10.0.0.1", "metadata.name": "etcd-0"}
_WORKLOADS = ("Deployment", "StatefulSet")


def render(folder: Path) -> list[Manifest]:
    """Return the manifests of a kustomization; skip the test if no kubectl with components is installed."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed (Debian's kubernetes-client)")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60)
    if done.returncode and re.search(r'unknown field "(components|labels)"', done.stderr):
        pytest.skip("this kubectl is older than 1.24, whose kustomize knows no components")
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return list(yaml.load_all(done.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def find_manifest(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the manifest of this kind and name."""
    (found,) = (each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def list_pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the templates of pods, by the names of their workloads."""
    return {each["metadata"]["name"]: each["spec"]["template"] for each in manifests if each["kind"] in _WORKLOADS}


def containers_of(pod: Manifest) -> Iterator[tuple[Manifest, list[str], Mapping[str, str]]]:
    """Yield each container with its expanded command line and environment."""
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        environ = environment_of(container)
        words = [*container.get("command", []), *container.get("args", [])]
        yield container, [expand_variables(str(word), environ) for word in words], environ


def environment_of(container: Manifest) -> dict[str, str]:
    """Return the environment variables of a container."""
    return {
        each["name"]: each["value"] if "value" in each else _FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container.get("env", [])
    }
