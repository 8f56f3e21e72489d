"""Reading a client's request: the endpoints and their bodies, including large ones.

api.py             the endpoints that generate answers, and the ids that engines give to their sequences
parsed_request.py  the request as the router serves it: parsed, identified, with the head for instances
"""
