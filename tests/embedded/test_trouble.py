"""What goes wrong on real machines: healed where that can be done, else said in words that help."""

import json
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from tests.embedded import kit
from tests.embedded.kit import ask, socket_directory

from coatcheck.embedded import find_directory, installs, is_running, join, places
from coatcheck.embedded.places import Places
from coatcheck.errors import EmbeddedUnavailable

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at processes in /proc")

IS_ROOT = os.geteuid() == 0


def move(directory: Path, name: str) -> Path:
    """Put a directory under another one with this name."""
    place = directory.parent / name / directory.name
    place.parent.mkdir()
    place.parent.chmod(directory.parent.stat().st_mode)
    return directory.rename(place)


def test_password_is_needed_on_both_roads(directory: Path, start) -> None:
    user = start(directory)
    tcp = urlsplit(user.said["tcp_url"])
    run = socket_directory(user.url)

    for place in (f"@127.0.0.1:{tcp.port}/coatcheck", f"@/coatcheck?host={run}&port=5432"):
        for login in ("coatcheck", "coatcheck:guess"):
            with pytest.raises((asyncpg.InvalidPasswordError, asyncpg.InterfaceError)):
                ask(f"postgresql://{login}{place}", "SELECT 1")
    assert stat.S_IMODE((directory / "postgres/password").stat().st_mode) == 0o600
    assert stat.S_IMODE(run.stat().st_mode) == 0o700


def test_git_is_told_to_look_away(empty: Path) -> None:
    Places.of(empty).ensure()

    assert (empty / ".gitignore").read_text() == "*\n"


def test_lost_password_is_replaced(directory: Path, start) -> None:
    (directory / "postgres/password").unlink()

    assert ask(start(directory).url, "SELECT 1") == 1


@pytest.mark.parametrize("name", ["x" * 90, "comma, and: spaces"], ids=["long", "odd"])
def test_socket_moves_where_its_path_would_not_do(directory: Path, start, name: str) -> None:
    place = move(directory, name)

    user = start(place)

    assert not socket_directory(user.url).is_relative_to(place)
    assert ask(user.url, "SELECT 1") == 1


def test_socket_directory_of_another_user_is_not_trusted(directory: Path, start) -> None:
    place = move(directory, "x" * 90)
    user = start(place)
    run = socket_directory(user.url)
    user.leave()
    kit.all_gone(place)
    run.chmod(0o777)
    bases = {"XDG_RUNTIME_DIR": str(run.parent), "TMPDIR": str(run.parent)}

    said = start(place, environment=bases).said

    if "url" in said:  # another one was to be had
        assert socket_directory(said["url"]) != run
    else:
        assert f"{run} (it is not a directory that only" in said["text"]


def test_deleted_socket_comes_back(directory: Path, start) -> None:
    user = start(directory)
    assert ask(user.url, "SELECT 1") == 1

    for each in socket_directory(user.url).iterdir():
        each.unlink()

    assert kit.ask_patiently(user.url, "SELECT 1") == 1


def test_path_too_long_for_postgres_is_refused(empty: Path) -> None:
    place = empty.parent.joinpath(*["x" * 200] * 5) / ".coatcheck"

    with pytest.raises(EmbeddedUnavailable, match="too long for Postgres"):
        join(place)

    assert not place.exists()


def test_stale_pid_of_somebody_else_is_no_obstacle(directory: Path, start) -> None:
    """After a crash of the machine the number in postmaster.pid may be anybody's, another Postgres's too."""
    bystander = subprocess.Popen(["postgres", "600"], executable=shutil.which("sleep"), user=_server_uid(directory))
    data = kit.data_of(directory)
    port = _free_port()
    run = directory / "postgres/run"
    run.mkdir(mode=0o700)
    os.chown(run, _server_uid(directory), -1)
    (data / "postmaster.pid").write_text(f"{bystander.pid}\n{data}\n1700000000\n{port}\n{run}\n127.0.0.1\n")
    (run / f".s.PGSQL.{port}.lock").write_text(f"{bystander.pid}\n{data}\n1700000000\n{port}\n{run}\n127.0.0.1\n")
    state = {"port": port, "socket": str(run), "version": "18", "supervisor": bystander.pid}
    (directory / "postgres/server.json").write_text(json.dumps(state))

    try:
        user = start(directory)

        assert ask(user.said["tcp_url"], "SELECT 1") == 1
        assert urlsplit(user.said["tcp_url"]).port == port
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_postgres_of_somebody_else_on_the_data_is_left_alone(directory: Path, start) -> None:
    data = kit.data_of(directory)
    install = installs.find_install(major=int((data / "PG_VERSION").read_text()))
    uid = _server_uid(directory)
    options = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={_free_port()}", "-c", "unix_socket_directories="]
    stranger = subprocess.Popen(
        [install.bin / "postgres", "-D", data, *options], user=uid, cwd="/", stderr=subprocess.DEVNULL
    )
    try:
        kit.until((data / "postmaster.pid").exists, what="the stranger runs")

        assert f"a Postgres that we did not start (pid {stranger.pid})" in start(directory).error
        assert stranger.poll() is None
    finally:
        stranger.terminate()
        stranger.wait()


def test_taken_port_is_given_up_and_the_socket_stays(directory: Path, start) -> None:
    first = start(directory)
    port = urlsplit(first.said["tcp_url"]).port
    first.leave()
    kit.all_gone(directory)

    with socket.create_server(("127.0.0.1", port)):
        second = start(directory)

        assert second.url == first.url
        assert ask(second.url, "SELECT 1") == 1
        assert urlsplit(second.said["tcp_url"]).port != port
        assert ask(second.said["tcp_url"], "SELECT 1") == 1
    assert f"port {port} is taken" in kit.log_of(directory)


def test_copy_of_a_directory_has_a_server_of_its_own(directory: Path, start) -> None:
    original = start(directory)
    assert ask(original.url, "SELECT 1") == 1
    original.kill()
    kit.all_gone(directory)
    copy = directory.parent / "copy" / ".coatcheck"
    copy.parent.mkdir()
    copy.parent.chmod(0o711)
    subprocess.run(["cp", "-a", directory, copy], check=True)

    original, other = start(directory), start(copy)
    ask(original.url, "CREATE TABLE kept AS SELECT 'original' AS name")
    ask(other.url, "CREATE TABLE kept AS SELECT 'copy' AS name")

    assert ask(original.url, "SELECT name FROM kept") == "original"
    assert ask(other.url, "SELECT name FROM kept") == "copy"
    assert ask(original.said["tcp_url"], "SELECT name FROM kept") == "original"
    other.leave()
    kit.all_gone(copy)


# --- binaries ---


def test_named_binaries_that_are_not_there_are_an_error(empty: Path, start) -> None:
    # A path is taken from where its user stands.
    wrong = start(empty, environment={"COATCHECK_PG_BIN": os.path.relpath(empty, kit.ROOT)})

    assert f"COATCHECK_PG_BIN={empty}: no initdb and no postgres in there" in wrong.error


@pytest.mark.parametrize(
    ("says", "text"),
    [("echo 'postgres (PostgreSQL) 13.4'", "says 'postgres (PostgreSQL) 13.4'"), ("exit 1", "not run")],
)
def test_named_binaries_that_will_not_do_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, text: str
) -> None:
    for name in installs.PROGRAMS:
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("COATCHECK_PG_BIN", str(tmp_path))

    with pytest.raises(EmbeddedUnavailable, match="14 or newer") as raised:
        installs.find_install()

    assert text in str(raised.value)


def test_without_binaries_the_ways_to_get_them_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installs, "find_wheel", lambda: None)
    monkeypatch.setattr(installs, "_USUAL_PLACES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("COATCHECK_PG_BIN", raising=False)

    with pytest.raises(EmbeddedUnavailable) as raised:
        installs.find_install()

    for way in ("pip install 'coatcheck[embedded]'", "your system's package", "COATCHECK_PG_BIN", "COATCHECK_STORE"):
        assert way in str(raised.value)


def test_order_of_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    named = installs.Install(Path("/named"), "17.1", "named")
    wheel = installs.Install(Path("/wheel"), "18.6", "wheel")
    newest, oldest = (installs.Install(Path(f"/{major}"), f"{major}.2", "installed") for major in (16, 14))
    monkeypatch.setattr(installs, "_named", lambda place: named)
    monkeypatch.setattr(installs, "find_wheel", lambda: wheel)
    monkeypatch.setattr(installs, "find_installed", lambda: iter([newest, oldest]))
    monkeypatch.delenv("COATCHECK_PG_BIN", raising=False)

    assert installs.find_install() == wheel
    assert installs.find_install(major=14) == oldest
    monkeypatch.setattr(installs, "find_wheel", lambda: None)
    assert installs.find_install() == newest
    monkeypatch.setenv("COATCHECK_PG_BIN", "/named")
    assert installs.find_install() == named
    with pytest.raises(EmbeddedUnavailable, match=r"made by Postgres 16, and here is only Postgres 17\.1 \(named\)"):
        installs.find_install(major=16)


def test_data_of_a_version_that_is_not_here_names_both(directory: Path, start) -> None:
    found = (kit.data_of(directory) / "PG_VERSION").read_text().strip()
    (kit.data_of(directory) / "PG_VERSION").write_text("9\n")

    error = start(directory).error

    assert "the data was made by Postgres 9, and here is only Postgres" in error
    assert f"Postgres {found}." in error


def test_data_that_is_none_is_not_touched(empty: Path, start) -> None:
    (empty / "postgres/data").mkdir(parents=True)

    assert "is not the data of a Postgres" in start(empty).error
    assert (empty / "postgres/data").is_dir()


# --- places ---


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere; another user's try is in test_users.py")
def test_directory_that_cannot_be_written_is_named(empty: Path, start) -> None:
    empty.parent.chmod(0o500)

    assert f"cannot write to {empty}" in start(empty).error
    empty.parent.chmod(0o700)


def test_file_in_the_way_is_named(empty: Path) -> None:
    empty.mkdir()
    (empty / "postgres").write_text("")

    with pytest.raises(EmbeddedUnavailable, match="is in the way"):
        join(empty)


@pytest.fixture
def small_disk(empty: Path) -> Iterator[Path]:
    """A disk too small for a cluster."""
    empty.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "tmpfs", empty], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")

    yield empty

    subprocess.run(["umount", empty], check=True)


@pytest.mark.skipif(not IS_ROOT or shutil.which("mount") is None, reason="only root can mount a small disk")
def test_full_disk_is_called_that(small_disk: Path, start) -> None:
    error = start(small_disk).error

    assert "the disk is full" in error
    assert "No space left on device" in error
    assert not kit.data_of(small_disk).exists()
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert "the disk is full" in start(small_disk).error
    kit.all_gone(small_disk)


def test_platform_without_locks_is_told_what_to_do(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "fcntl", None)

    with pytest.raises(EmbeddedUnavailable, match="COATCHECK_STORE"):
        join(empty)


def test_nearest_directory_upwards_is_found(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = empty.parent / "a/b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)

    assert find_directory() is None
    empty.mkdir()
    assert find_directory() == empty
    assert find_directory(deep) == empty
    (empty.parent / "a/.coatcheck").mkdir()
    assert find_directory(deep) == empty.parent / "a/.coatcheck"


def test_looking_makes_nothing(empty: Path) -> None:
    assert not is_running(empty)
    assert not empty.exists()


def _server_uid(directory: Path) -> int:
    return kit.data_of(directory).stat().st_uid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
