"""An instance and its HTTP server.

ports.py          binds the ports before the model is loaded, and listens on them after that
surroundings.py   finds the router, the pool and the checkpoint of an instance
instance.py       Instance: creates all parts of an instance from its arguments
control.py        commands of an operator or a trainer: pause, resume, sleep, wake up, update of weights
control_paths.py  the HTTP paths of these commands, as in FastDeploy
endpoints.py      the other HTTP paths
http_server.py    HTTP for all paths: HEAD, request ids, limits, and error responses
server.py         starts and stops the HTTP server
registration.py   registers the instance at the router, again and again
"""
