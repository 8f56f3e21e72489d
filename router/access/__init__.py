"""Who may ask, and how much at once.

auth.py       API keys of clients, and the token of those who may change the instances
admission.py  how many requests are served at once, in all and for each client
"""
