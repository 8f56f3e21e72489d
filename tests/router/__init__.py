"""Tests of the router. Instances are stand-ins (``stand_in.py``): real HTTP servers with scripted responses."""
