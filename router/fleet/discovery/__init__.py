"""Service discovery: finds instances as pods of a Kubernetes cluster.

pods.py       Pod: a pod and its instance, read from labels, annotations and state
pod_watch.py  PodWatch: the pods that match a selector, from the cluster's API server
identity.py   finds out which engine a server runs
discovery.py  Discovery: registers the instances of ready pods, and removes those of other pods
"""

from router.fleet.discovery.discovery import Discovery
from router.fleet.discovery.identity import IdentityHidden, ask_identity, ask_sglang

__all__ = ["Discovery", "IdentityHidden", "ask_identity", "ask_sglang"]
