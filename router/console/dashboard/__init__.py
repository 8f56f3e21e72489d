"""kvrouter dashboard: shows the state of the router, its instances and the pool, as a web page.

This is a separate process next to the router. It polls all metrics every two seconds, and stores those of the last hour
in memory. NiceGUI is imported only when the command runs; the page loads nothing from the internet.

program.py    main: reads the flags, and opens the port
site.py       the web application: its paths, and the host names that it accepts
collector.py  Collector: polls the router, the instances and the masters regularly
scraper.py    Scraper: fetches the metrics of instances and masters
figures.py    the metrics of the router, of instances and of masters as plain data
history.py    History: the results of the last polls, and the increase of counters between them
events.py     finds the changes between two polls
summaries.py  computes further metrics: where the KV of prompt tokens came from, outcomes of requests, quantiles
words.py      formats metrics with their units, and other texts
views/        the views of the page, one file for each
"""

from router.console.dashboard.program import main, make_parser

__all__ = ["main", "make_parser"]
