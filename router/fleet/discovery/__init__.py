"""Service discovery: the instances are the pods of a Kubernetes cluster.

pods.py       Pod: a pod and its instance, read from its labels, its annotations and its state
pod_watch.py  PodWatch: the current pods of a selector, watched through the cluster's API server
identity.py   which engine answers at an address
discovery.py  Discovery: registers the instances of ready pods, and removes those of pods that are not ready
"""

from router.fleet.discovery.discovery import Discovery

__all__ = ["Discovery"]
