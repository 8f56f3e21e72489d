"""The way of one request: selection, attempts, the response, resumption.

proxy.py      the data plane: every request under /v1
request.py    one client's request, from its body to the end of its response
selection.py  which instance or pair serves it
attempt.py    one attempt at an instance or a pair, all its legs watched
resume.py     segments of a preempted request merged into one response
aborts.py     aborts at engines of requests that nobody reads any more
"""
