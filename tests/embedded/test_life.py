"""The server lives as long as somebody needs it, whoever is killed, and keeps what was committed."""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import asyncpg
import pytest
from tests.embedded import kit
from tests.embedded.kit import ask, ask_patiently, until

from coatcheck.embedded import installs, is_running, join, wait_stopped
from coatcheck.store import Store, migrate, newest_version
from coatcheck.worker.settings import redacted

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at processes in /proc")

WHEEL = installs.find_wheel()
INSTALLED = next(installs.find_installed(), None)


@pytest.mark.parametrize("install", [WHEEL, INSTALLED], ids=["wheel", "installed"])
def test_data_survives_stop_and_start(install: installs.Install | None, empty: Path, start) -> None:
    if install is None:
        pytest.skip("not on this machine")
    chosen = {"COATCHECK_PG_BIN": str(install.bin)}

    first = start(empty, environment=chosen)
    ask(first.url, "CREATE TABLE kept AS SELECT 42 AS answer")
    assert ask(first.said["tcp_url"], "SHOW fsync") == "on"
    assert ask(first.url, "SHOW server_version").startswith(install.version)
    first.leave()
    kit.all_gone(empty)
    second = start(empty, environment=chosen)

    assert second.said == first.said
    assert ask(second.url, "SELECT answer FROM kept") == 42


def test_processes_that_join_at_once_share_one_server(directory: Path, start) -> None:
    users = [start(directory) for _ in range(4)]

    assert len({user.url for user in users}) == 1
    assert len({ask(user.url, "SELECT pg_postmaster_start_time()") for user in users}) == 1
    assert len(kit.supervisors(directory)) == 1


def test_killing_the_only_user_leaves_nothing_running(directory: Path, start) -> None:
    user = start(directory)
    run = directory / "postgres/run"
    assert ask(user.url, "SELECT 1") == 1
    assert len(list(run.glob(".s.PGSQL.*"))) > 1

    user.kill()

    kit.all_gone(directory)
    assert not [each for each in run.iterdir() if each.exists()]
    assert not is_running(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells Postgres of its parent's death")
def test_killing_user_and_supervisor_leaves_nothing_running(directory: Path, start) -> None:
    user = start(directory)
    assert ask(user.url, "SELECT 1") == 1

    for pid in (user.process.pid, *kit.supervisors(directory)):
        kit.kill(pid)

    kit.all_gone(directory)
    assert not (kit.data_of(directory) / "postmaster.pid").exists()


def test_killing_one_of_two_users_leaves_the_server_alone(directory: Path, start) -> None:
    first, second = start(directory), start(directory)
    since = ask(second.url, "SELECT pg_postmaster_start_time()")
    assert first.url == second.url

    first.kill()

    # The supervisor looks several times while the server waits.
    assert ask(second.url, "SELECT pg_postmaster_start_time() FROM pg_sleep(1)") == since


def test_user_that_leaves_lets_the_server_stop(directory: Path) -> None:
    server = join(directory)
    assert is_running(directory)

    server.leave()
    server.leave()

    assert wait_stopped(directory)
    kit.all_gone(directory)


def test_joins_of_one_process_count(directory: Path) -> None:
    servers = []
    threads = [threading.Thread(target=lambda: servers.append(join(directory))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({server.url for server in servers}) == 1
    for server in servers[:-1]:
        server.leave()
    assert ask(servers[-1].url, "SELECT 1 FROM pg_sleep(1)") == 1
    servers[-1].leave()

    kit.all_gone(directory)


def test_newcomer_during_the_stop_gets_a_new_server(directory: Path, start) -> None:
    for _ in range(3):
        user = start(directory)
        assert ask(user.url, "SELECT 1") == 1
        user.kill()


def test_killed_supervisor_is_replaced_at_the_same_address(directory: Path, start) -> None:
    users = [start(directory), start(directory)]
    assert users[0].url == users[1].url  # both have joined: a user whose supervisor dies in its start is told so
    ask(users[0].url, "CREATE TABLE kept AS SELECT 42 AS answer")
    (killed,) = kit.supervisors(directory)

    kit.kill(killed)
    until(lambda: kit.supervisors(directory) not in ([], [killed]), what="a new supervisor is there")

    assert ask_patiently(users[1].url, "SELECT answer FROM kept") == 42
    assert ask_patiently(users[0].said["tcp_url"], "SELECT answer FROM kept") == 42
    assert len(kit.supervisors(directory)) == 1


def test_terminated_supervisor_stops_in_order_and_is_replaced(directory: Path, start) -> None:
    user = start(directory)
    ask(user.url, "CREATE TABLE kept AS SELECT 42 AS answer")
    (told,) = kit.supervisors(directory)

    kit.kill(told, signal.SIGTERM)
    until(lambda: kit.supervisors(directory) not in ([], [told]), what="a new supervisor is there")

    assert ask_patiently(user.url, "SELECT answer FROM kept") == 42
    assert "database system was not properly shut down" not in kit.log_of(directory)


def test_killed_postmaster_is_started_again_though_a_backend_is_busy(directory: Path, start) -> None:
    user = start(directory)
    ask(user.url, "CREATE TABLE kept AS SELECT 42 AS answer")
    killed = kit.postmaster(directory)
    busy = threading.Thread(target=_compute, args=(user.url,))
    busy.start()
    until(lambda: ask(user.url, "SELECT count(*) FROM pg_stat_activity WHERE query ~ '^SELECT sum'"), what="it is busy")

    kit.kill(killed)

    assert ask_patiently(user.url, "SELECT answer FROM kept") == 42
    assert kit.postmaster(directory) != killed
    busy.join()


def _compute(url: str) -> None:
    """A query that looks at nothing but its numbers: such a backend does not notice that its server is dead."""
    with pytest.raises((OSError, asyncpg.PostgresError)):
        ask(url, "SELECT sum(a.n * b.n) FROM generate_series(1, 1000000) a(n), generate_series(1, 1000000) b(n)")


def test_everything_killed_at_once_leaves_nothing_and_the_next_user_heals_it(directory: Path, start) -> None:
    user = start(directory)
    ask(user.url, "CREATE TABLE kept AS SELECT 42 AS answer")
    for pid in (user.process.pid, *kit.supervisors(directory), kit.postmaster(directory)):
        kit.kill(pid)

    kit.all_gone(directory)
    assert (kit.data_of(directory) / "postmaster.pid").exists()

    assert ask(start(directory).url, "SELECT answer FROM kept") == 42


def test_user_killed_while_the_cluster_is_made_leaves_no_half_of_it(empty: Path, start) -> None:
    user = start(empty)
    until(lambda: list((empty / "postgres").glob("data.new-*/base")), what="initdb is at work")

    for pid in (user.process.pid, *kit.supervisors(empty)):
        kit.kill(pid)
    kit.all_gone(empty)

    assert not kit.data_of(empty).exists()
    assert ask(start(empty).url, "SELECT 1") == 1
    assert not list((empty / "postgres").glob("data.new-*"))


def test_deleted_directory_ends_its_server_though_it_is_made_again(directory: Path, start) -> None:
    user = start(directory)
    assert ask(user.url, "SELECT 1") == 1
    (supervisor,) = kit.supervisors(directory)
    first = {kit.postmaster(directory), supervisor}

    kit.kill(supervisor, signal.SIGSTOP)  # it looks only when all has happened
    shutil.rmtree(directory)
    again = start(directory)
    assert ask(again.url, "SELECT 1") == 1
    kit.kill(supervisor, signal.SIGCONT)

    until(lambda: not first & kit.running(directory).keys(), what="the first server is gone")
    assert ask(again.url, "SELECT 1") == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_keeps_the_server(directory: Path) -> None:
    server = join(directory)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    server.leave()

    assert ask(server.url, "SELECT 1 FROM pg_sleep(1)") == 1
    os.close(writer)
    os.waitpid(child, 0)
    os.close(reader)

    kit.all_gone(directory)


async def test_address_is_one_that_the_store_takes(directory: Path, start) -> None:
    user = start(directory)
    url = user.url

    await migrate(url)
    store = Store(url, pool_size=1)
    try:
        assert await store.ping() == newest_version()
    finally:
        await store.close()

    password = (directory / "postgres/password").read_text().strip()
    assert password in url
    assert password not in redacted(url)
