"""An instance and the server around it, from the ports upward.

ports.py        its ports: taken before the model is loaded, and listened on after
surroundings.py router, pool and checkpoint that the arguments name, looked up before torch is loaded
instance.py     Instance: the parts that its arguments ask for, put together, and its registration
control.py      what an operator or a trainer orders: pause, resume
control_paths.py  the HTTP paths of these orders, with FastDeploy's answers
endpoints.py    the HTTP paths, and how a completion request is answered
http_server.py  HTTP around the endpoints: HEAD, ids of requests, limits, and errors in their API's shape
server.py       the HTTP server: how it runs, and how it stops
registration.py  the heartbeat to the router
why_miss_paths.py  HTTP paths that explain why a request was a miss
"""
