"""`make scale`: what a million parked tasks cost. `__main__` says how it is done."""
