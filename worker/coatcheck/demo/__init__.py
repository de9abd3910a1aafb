"""What `coatcheck demo` plays: replicas, peers, a kill -9 in the middle, and books that say whether anything was lost.

`coatcheck.cli.demo` plays it. Everything on stage is a real process that talks through a real broker; the demo only
asks, kills, reads logs and keeps the books.
"""
