"""Explains why a request was a miss, after it has ended.

recent_requests.py  the last requests, recorded when they have ended
explainer.py        compares one of them, or a prompt, with the pool and the requests before it
"""
