"""kvrouter dashboard: the state of the router, its instances and the pool, as a web page.

It is a separate process next to the router. It polls all metrics every two seconds and stores the last hour in memory.
NiceGUI, which includes its own assets, is imported when the command runs.

program.py    main: the flags, and the port
site.py       the web application: the view of each path, and which hosts are allowed
collector.py  Collector: polls everything periodically
scraper.py    Scraper: fetches the metrics of instances and masters
figures.py    metrics of the router, the instances and the masters as plain data
history.py    History: the last polls, and the increase of counters between them
summaries.py  derived metrics: origins of prompts, outcomes of requests, quantiles
words.py      formatting of metrics with their units
views/        one view per file
"""

from router.console.dashboard.program import main, make_parser

__all__ = ["main", "make_parser"]
