"""The views of the dashboard, one per file, and the frame that all views share. They import NiceGUI.

frame.py     open_frame: navigation, freshness, light or dark, the clock; Context: a view in one browser
parts.py     texts, tables, bars of origins
charts.py    values over time
look.py      colours and the style sheet
prompts.py   where prompts come from
traffic.py   requests, times, the queue, errors
fleet.py     the instances, and operator commands for them
pool.py      the pool and its masters
request.py   one request: its attempts, reasons and times
chat.py      a conversation through the router, and where each of its prompts came from
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
