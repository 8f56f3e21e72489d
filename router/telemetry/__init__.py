"""Figures and records of the requests, for operators.

metrics.py  Prometheus metrics, under the names of FastDeploy's Go router where it has them
audit.py    the access log, and the last requests kept to be explained
"""
