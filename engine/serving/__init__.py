"""An instance and its HTTP server, from the ports upward.

ports.py        its ports: bound before the model is loaded, and opened after
surroundings.py router, pool and checkpoint of the arguments, resolved before torch is loaded
instance.py     Instance: the parts that its arguments configure, and its registration
control.py      commands of an operator or a trainer: pause, resume, sleep, update of weights
control_paths.py  the HTTP paths of these commands, with FastDeploy's answers
endpoints.py    the HTTP paths, and how a completion request is answered
http_server.py  HTTP for all endpoints: HEAD, request ids, limits, and errors in their API's format
server.py       the HTTP server: start and stop
registration.py  the heartbeat to the router
"""
