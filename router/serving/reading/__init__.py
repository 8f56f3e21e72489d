"""Reading a client's request: the endpoints and their bodies, including large ones.

api.py             the endpoints that generate answers, and the ids that engines give to their sequences
head.py            the head, parsed once for all requests of a connection that have the same one
large.py           a large body is scanned before it is parsed, while other requests continue
parsed_request.py  the request as the router serves it: parsed, identified, with the head for instances
"""
