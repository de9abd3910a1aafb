"""`python -m tests.fuzz`: fuzzed messages against a replica and a sweeper in memory; a failure is printed in full.

python -m tests.fuzz                          20 seeds of 5,000 messages
python -m tests.fuzz --seed 7 --count 50000   one seed, as long as you like
python -m tests.fuzz --seed 7 --only 1234     one message, alone
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter

from tests.fuzz.world import MemoryWorld

SEEDS = 20
COUNT = 5_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help=f"one seed instead of 0 to {SEEDS - 1}")
    parser.add_argument("--count", type=int, default=COUNT, help="messages for each seed")
    parser.add_argument("--only", type=int, help="only the message with this number")
    options = parser.parse_args()
    seeds = range(SEEDS) if options.seed is None else [options.seed]
    fates, begun_s = Counter[str](), time.perf_counter()
    for seed in seeds:
        report = asyncio.run(MemoryWorld().run(seed, options.count, only=options.only))
        fates += report.book.fates()
        failure = report.explain()
        if failure is not None:
            print(failure)
            return 1
        if options.only is not None:
            print(report.book.sent[options.only])
    for fate, count in sorted(fates.items()):
        print(f"{count:7,}  {fate}")
    print(f"{sum(fates.values()):7,}  messages accounted for in {time.perf_counter() - begun_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
