"""Why was a request a miss? An instance's answer, when the request is over.

recent_requests.py  the last requests, taken down when they have ended
explainer.py        one of them, or a prompt, beside the pool and the requests before it
"""
