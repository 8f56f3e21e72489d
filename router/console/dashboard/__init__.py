"""kvrouter dashboard: the router, its instances and the pool at work, as a page for a browser.

A process of its own beside the router. It looks at everything every two seconds and keeps an hour of that in memory;
NiceGUI, which brings its own assets, is loaded when the command runs.

program.py    main: the flags, and the port
site.py       the web application: which path shows which view, and who may ask
collector.py  Collector: a look at everything, on a clock
scraper.py    Scraper: asks instances and masters for their figures
figures.py    their accounts, as plain figures
history.py    History: the last looks, and how counters grew between them
summaries.py  figures summed up for people: origins of prompts, ends of answers, quantiles
words.py      figures with their units, for people
views/        one view a file
"""

from router.console.dashboard.program import main, make_parser

__all__ = ["main", "make_parser"]
