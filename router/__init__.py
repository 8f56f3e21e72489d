"""The router: where requests go. It knows instances over HTTP only.

A request goes down one staircase, ``http.server -> serving -> http.exchange``; rooms import only downward:

launch/      python -m router.launch: reads the settings and starts one process or several
app.py       all parts put together, and the control plane in FastAPI
register.py  python -m router.register: the sidecar that registers a server which cannot register itself
simulate.py  python -m router.simulate: a trace of requests over simulated instances
console/     kvrouter: the router, or with a command an operator's program beside it
sharing/     several processes, and several routers, with the knowledge of one
serving/     the way of one request: selection, attempts, the response, resumption
telemetry/   metrics, the access log, explanations
fleet/       the instances: registration, pairing, health, load
access/      API keys of clients, limits, admission
settings/    everything an operator can set, and which source of a value wins
policies/    which instance a request goes to, one file a policy
http/        HTTP/1.1 to clients and to instances
"""
