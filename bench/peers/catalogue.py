"""Which frameworks are measured, and the environment of each."""

import asyncio
import re
import shutil
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCRATCH = ROOT / ".cache" / "bench-peers"
RESTATE_SERVER = "@restatedev/restate-server@1.7.12"


class PeerFailed(Exception):
    """One framework could not be measured; the text goes into its row."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A framework in one of its shapes."""

    name: str
    label: str
    servers: tuple[str, ...]
    """Names that the kernel has for processes whose CPU counts as a server's, also if they were running before."""
    roles: tuple[str, ...]
    """Roles of its script that start before the clients, in this order; each says when the next may begin."""
    variant: str = ""
    client_count: int = 1
    """Two where the framework is a library and its client does the work: one for each core."""
    width_limit: int = 1000
    """The most lifecycles under way at once; more would only slow it down."""
    leaves: bool = False
    """Whether its script has a role `clean`, for what dropping the database does not remove."""

    @property
    def slug(self) -> str:
        return "-".join(filter(None, (self.name, self.variant)))

    @property
    def script(self) -> Path:
        return HERE / f"on_{self.name}.py"


PEERS = (
    Peer("coatcheck", "Coatcheck", ("beam.smp", "postgres"), ("migrate", "echo", "worker"), leaves=True),
    Peer("celery", "Celery chord, Redis", ("beam.smp", "redis-server"), ("worker",), "redis", leaves=True),
    Peer(
        *("celery", "Celery chord, Postgres", ("beam.smp", "postgres"), ("worker",), "postgres"),
        width_limit=60,  # every waiting chord is looked at once a second
        leaves=True,
    ),
    Peer("dbos", "DBOS, direct", ("postgres",), ("migrate",), "direct", client_count=2),
    Peer("dbos", "DBOS, queues", ("postgres",), ("migrate", "worker", "worker"), "queues"),
    Peer("restate", "Restate", ("restate-server",), ("server", "worker", "register")),
    Peer("langgraph", "LangGraph, nodes", ("postgres",), ("migrate",), "nodes", client_count=2),
    Peer("langgraph", "LangGraph, interrupt", ("postgres",), ("migrate",), "interrupt", client_count=2),
    Peer("absurd", "Absurd", ("postgres",), ("migrate", "worker", "worker")),
)


def version_of(peer: Peer) -> str:
    """The pinned version of a framework, as its requirements say."""
    if peer.name == "coatcheck":
        return ""
    packages = {"restate": "restate-sdk", "absurd": "absurd-sdk"}
    found = re.search(rf"^{packages.get(peer.name, peer.name)}==(\S+)$", requirements(peer).read_text(), re.MULTILINE)
    assert found is not None, f"{requirements(peer).name} pins every package"
    server = f", server {RESTATE_SERVER.rpartition('@')[2]}" if peer.name == "restate" else ""
    return found[1] + server


def requirements(peer: Peer) -> Path:
    return HERE / f"requirements-{peer.name}.txt"


async def ensure_environment(peer: Peer) -> Path:
    """The Python of a framework's environment, built when it is missing or its requirements have changed.

    Raises `PeerFailed` if something cannot be installed; the log of the installation stays beside the environment.
    """
    if peer.name == "coatcheck":
        return Path(sys.executable)
    home = SCRATCH / peer.name
    python, mark = home / "bin" / "python", home / "built-from.txt"
    wanted = requirements(peer).read_text() + (RESTATE_SERVER if peer.name == "restate" else "")
    if mark.exists() and mark.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    await asyncio.to_thread(venv.create, home, with_pip=True)
    await install(home, str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements(peer)))
    if peer.name == "restate":
        # Only the server is needed: no script of a package runs during the installation.
        quiet = ("--ignore-scripts", "--no-audit", "--no-fund")
        await install(home, "npm", "install", "--prefix", str(home), *quiet, RESTATE_SERVER)
    mark.write_text(wanted)
    return python


async def install(home: Path, program: str, *arguments: str) -> None:
    where = shutil.which(program)
    if where is None:
        raise PeerFailed(f"could not be installed: there is no {program} here")
    with (home / "install.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(where, *arguments, stdout=log, stderr=log, cwd=home)
        if await process.wait() != 0:
            raise PeerFailed(f"could not be installed; see {home.relative_to(ROOT)}/install.log")
