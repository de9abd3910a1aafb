"""A web front with live progress: the browser gets a ticket at once, watches a bar, and may leave and come back.

    python -m examples.web

Look at `front.py`: it starts a task and reads its row, nothing else. It holds no task, so a report goes on when the
page is closed or the front is killed. The state is in the row, so any front shows it. `reports.py` is the service.
"""
