"""Parses a client's request: its head, and the body of an endpoint that generates tokens.

api.py             the endpoints that generate tokens, and the ids of a request's sequences at engines
parsed_request.py  ParsedRequest: a client's request, parsed, with its ids and with the head for instances
sessions.py        SessionHeaders: the headers in which clients name a session and its parent
"""
