"""Service discovery: the fleet is made of the pods of a Kubernetes cluster.

pods.py       Pod: a pod and the instance in it, as told by its labels, its annotations and its state
pod_watch.py  PodWatch: the pods that a selector names, kept current through the cluster's API server
identity.py   which engine answers at an address
discovery.py  Discovery: registers the instances of pods that are ready, and removes those of pods that are not
"""

from router.fleet.discovery.discovery import Discovery

__all__ = ["Discovery"]
