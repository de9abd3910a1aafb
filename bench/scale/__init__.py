"""`make scale`: what a million parked tasks cost. `__main__` explains it."""
