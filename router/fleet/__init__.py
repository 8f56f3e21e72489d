"""The instances: who has registered, who is healthy, who may be paired with whom.

registration.py   an instance's description of itself, in FastDeploy's form
registry.py       all instances, and the router's running requests on each
register_file.py  instances known from the router's start on
pairing.py        which prefill and decode instance may work together, and the message to each
health.py         health probes of every instance, in parallel
breaker.py        the circuit breaker of one instance
scrape.py         the load that instances report of themselves
snapshot.py       the state that a router keeps over a restart
tasks.py          background work, kept alive until it is done
"""
