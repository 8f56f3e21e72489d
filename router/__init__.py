"""The router: decides which instance serves a request, and sends the request there.

The router communicates with instances only over HTTP.

The path of a request is ``http.server -> serving -> http.exchange``. A package imports only packages listed below it:

launch/      python -m router.launch: reads the settings and starts one process or several
epp/         the endpoint picker: requests that a gateway such as Envoy reports over gRPC
app.py       creates all parts, and defines the control plane in FastAPI
register.py  python -m router.register: a sidecar that registers a server that cannot register itself
console/     kvrouter: starts the router or, with a command, an operator program
sharing/     state that several worker processes and several routers share
serving/     serves one request: selection, attempts, the response, resumption
telemetry/   metrics, access log, explanations, spans
fleet/       the instances: registration, pairing, health, load
access/      API keys of clients, limits, admission
settings/    all settings, and which source of a value has precedence
policies/    choose the instance for a request
http/        HTTP/1.1 with clients and instances
"""
