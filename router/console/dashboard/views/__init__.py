"""The views of the dashboard, one for each file, and the frame that all views share. They import NiceGUI.

frame.py     open_frame: navigation, state of the router, light or dark colours; Context: a view in one browser
parts.py     elements of views: texts, tables, bars
charts.py    charts of values over time
style.py     colours and the style sheet
prompts.py   view: where the KV of prompts came from
traffic.py   view: requests, their times, the queue, errors
fleet.py     view: the instances, and operator commands for them
pool.py      view: the pool and its masters
request.py   view: one request, with its attempts, reasons and times
chat.py      view: a conversation through the router, and how much of its prompts was cached
"""

from router.console.dashboard.views.chat import CHAT
from router.console.dashboard.views.fleet import FLEET
from router.console.dashboard.views.frame import Site, View, open_frame
from router.console.dashboard.views.pool import POOL
from router.console.dashboard.views.prompts import PROMPTS
from router.console.dashboard.views.request import REQUEST
from router.console.dashboard.views.traffic import TRAFFIC

__all__ = ["VIEWS", "Site", "View", "open_frame"]

VIEWS = (PROMPTS, TRAFFIC, FLEET, POOL, REQUEST, CHAT)
