"""The router: where requests go. It knows instances over HTTP only.

launch.py     the program: python -m router.launch, kvrouter
app.py        RouterApp: the parts put together, and the control plane
register.py   the sidecar of a server that cannot register itself: python -m router.register
simulate.py   replays a trace through the policies: python -m router.simulate
serving       the way of one request: selection, attempts, the response, resumption
telemetry     metrics, access log and explanations
fleet         the instances: registrations, health, pairing
access        who may ask, and how much at once
settings      everything that an operator can set
policies      which instance a request goes to
http          HTTP with clients and with instances

Each room is entered by its ``__init__``; rooms depend downward in this order: launch, register and simulate; app;
serving; telemetry; fleet and access; settings; policies and http.
"""
