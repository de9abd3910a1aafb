"""Child processes of the command line: one `Crew` behind `worker --processes`, `dev`, `demo` and the chaos trials.

`crew.py` starts, watches, replaces and stops processes; `child.py` is what each of them runs first; `reports.py` is how
a replica tells its supervisor how it is; `supervisor.py` is `coatcheck worker --processes N`.
"""
