"""Actors: what stands around the production code in a world.

tokens.py    answers that follow from the prompt, so that each can be verified
http.py      a small HTTP server and client for actors, apart from the router's own
engines.py   what an instance of each engine says: its streams, answers and hand-overs
instance.py  Instance: an instance of any dialect, which fails as it is told
client.py    Client: asks, and judges what it gets
router.py    RouterActor: the real router, of one process
fleet.py     ManyWorkers: the real router of several processes, and what stands for the operating system
redis.py     RedisActor: as much of Redis as the routers use
"""
