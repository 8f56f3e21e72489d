"""A client's request, read: the endpoints and their bodies, and large ones among those.

api.py             the endpoints whose answers are generated, and the ids that engines give to their sequences
head.py            the head, read once for all requests of a connection that have the same
large.py           a large body is looked through before it is parsed, while other requests go on
parsed_request.py  the request as the router serves it: parsed, named, with the head that instances get
"""
