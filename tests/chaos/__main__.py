"""Several workers, two sweepers, peers and clients on servers of their own, and everything broken that can be.

    python -m tests.chaos --tasks 2000 --minutes 1.2 --seed 1
    python -m tests.chaos --broker-kind pg --every-fault

An independent checker reads the evidence afterwards. It exits with 0 only if nothing is wrong and a process has died
at every crash point, or at as many as it was told. Evidence is kept if not, and the line that checks it again is
printed.
"""

import argparse
import asyncio
import logging
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.crew import ROOT
from tests.chaos.display import Display
from tests.chaos.report import render
from tests.chaos.servers import Servers
from tests.chaos.trial import Options, Outcome, Trial

CACHE = ROOT / ".cache" / "chaos"
DISK_MB = 256
DISK_KB_PER_TASK = 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=2000, help="ask for at least so many (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=1.2, help="break things for so long (default: %(default)s)")
    parser.add_argument("--seed", default=str(time.time_ns() % 1_000_000), help="of tasks and faults")
    parser.add_argument("--workers", type=int, default=3, help="how many replicas (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to settle, at most")
    parser.add_argument("--report", type=Path, help="where to write the page (default: under .cache/chaos)")
    parser.add_argument("--evidence", type=Path, help="keep the evidence here, which must not exist yet")
    parser.add_argument(
        "--broker-kind", choices=("amqp", "pg"), default="amqp", help="RabbitMQ, or queues in the trial's Postgres"
    )
    parser.add_argument("--every-fault", action="store_true", help="go on until everything that can be broken was, too")
    parser.add_argument("--points", type=int, help="at how many crash points a process must die (default: all)")
    parser.add_argument("--broker", help="a RabbitMQ to borrow where none can be started; it is not harmed")
    arguments = parser.parse_args()
    directory = arguments.evidence or CACHE / f"{time.strftime('%Y%m%d-%H%M%S')}-seed-{arguments.seed}"
    directory.mkdir(parents=True)
    options = Options(
        task_count=arguments.tasks,
        minutes=arguments.minutes,
        seed=arguments.seed,
        worker_count=arguments.workers,
        patience_s=arguments.patience,
        point_count=arguments.points,
        needs_every_fault=arguments.every_fault,
    )
    brokers = {"broker_kind": arguments.broker_kind, "borrowed_broker": arguments.broker}
    try:
        outcome = run(options, directory, Display(), **brokers)
    except asyncio.CancelledError:
        print(f"interrupted; what there is of it: {directory}")
        return 130
    report = arguments.report or CACHE / f"report-{arguments.broker_kind}-seed-{arguments.seed}.md"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(render(outcome, directory))
    print(outcome.verdict)
    print(f"report: {report}")
    if not is_sound(outcome):
        print(f"evidence: {directory}\nto check it again: python -m tests.chaos.checker {directory}")
        return 1
    if arguments.evidence is None:
        shutil.rmtree(directory)
    return 0


def run(
    options: Options,
    directory: Path,
    display: Display,
    *,
    broker_kind: str = "amqp",
    borrowed_broker: str | None = None,
) -> Outcome:
    """One trial on servers of its own, which are gone afterwards."""
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # a broker that is away is what we are here for
    with ExitStack() as running:
        running.callback(display.end)
        disk_mb = DISK_MB + options.task_count * DISK_KB_PER_TASK // 1024
        servers = Servers(running, disk_mb=disk_mb, broker_kind=broker_kind, borrowed_broker=borrowed_broker)
        return asyncio.run(Trial(options, servers, directory, display).run())


def is_sound(outcome: Outcome) -> bool:
    return outcome.exit_code == 0 and outcome.is_settled and outcome.is_broken_enough


if __name__ == "__main__":
    sys.exit(main())
