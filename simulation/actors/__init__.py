"""Actors: the simulated parts of a world, and the production code in simulated processes.

tokens.py    computes the right answer to a prompt, so that every response can be verified
http.py      a small HTTP server and client for actors, independent of the router's
engines.py   request and response formats of each engine
instance.py  Instance: simulates an instance of any dialect, with faults
client.py    Client: sends requests, and judges the responses
router.py    RouterActor: a real router with one process
fleet.py     ManyWorkers: a real router with several processes
redis.py     RedisActor: simulates the part of Redis that routers use
"""
