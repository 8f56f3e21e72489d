"""Service discovery: finds instances as pods of a Kubernetes cluster.

pods.py       Pod: a pod and its instance, read from labels, annotations and state
pod_watch.py  PodWatch: the pods that match a selector, from the cluster's API server
identity.py   finds out which engine runs at an address
discovery.py  Discovery: registers the instances of ready pods, and removes those of other pods
"""

from router.fleet.discovery.discovery import Discovery

__all__ = ["Discovery"]
