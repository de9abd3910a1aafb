"""A web front with live progress: the browser gets a ticket at once, watches a bar, and may leave and come back.

    python -m examples.web

Look at `front.py`: it starts a task and reads its row, nothing else. It holds no task, so closing the page, or killing
the front, stops no report; and since the state is in the row, any front shows it. `reports.py` is what it asks.
"""
