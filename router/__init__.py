"""The router: it decides which instance serves a request. It reaches instances over HTTP only.

The path of a request is ``http.server -> serving -> http.exchange``. Packages import only packages listed below them:

launch/      python -m router.launch: reads the settings and starts one process or several
app.py       assembles all parts, and defines the control plane in FastAPI
register.py  python -m router.register: the sidecar that registers a server which cannot register itself
console/     kvrouter: starts the router or, with a command, an operator program that runs next to it
sharing/     shared state of several worker processes and of several routers
serving/     the handling of one request: selection, attempts, the response, resumption
telemetry/   metrics, the access log, explanations
fleet/       the instances: registration, pairing, health, load
access/      API keys of clients, limits, admission
settings/    everything an operator can set, and which source of a value has precedence
policies/    which instance a request goes to; small policies share a file
http/        HTTP/1.1 to clients and to instances
"""
