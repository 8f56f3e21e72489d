"""A client's request, read: how the endpoints' bodies differ, what the request is, and large ones.

api.py             the endpoints whose answers are generated, and the ids that engines give to their sequences
large.py           a large body is looked through before it is parsed, while other requests go on
parsed_request.py  the request as the router serves it: parsed, named, with the head that instances get
"""
