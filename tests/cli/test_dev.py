"""The development loop with real processes: found, reloaded, killed, stopped, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cli.dev_kit import COLOUR, Dev, alive, is_served, server_pids
from tests.cli.kit import Cli, until

from coatcheck.cli.dev import DevCrew, make_environ, names_of
from coatcheck.cli.dev_screen import Screen
from coatcheck.cli.dev_sources import Broken, Offer, probe
from coatcheck.cli.new import make_pages, write
from coatcheck.cli.processes import crew as crews
from coatcheck.cli.processes.crew import Deaths, describe_end
from coatcheck.embedded import wait_stopped
from coatcheck.worker.settings import Checkpointing, LogLevel, Settings

APPS = ("shop.service:app", "shop.prices:app")
GATED = '''
import asyncio
from pathlib import Path
from coatcheck.worker import App, Context

app = App("shop-prices")


@app.task
async def price_of(ctx: Context, item: str) -> int:
    """Things that are gated have no price before the file of their name is there."""
    while item.startswith("gated") and not Path(item).exists():
        await asyncio.sleep(0.02)
    return 100 * len(item)
'''


def make_project(directory: Path) -> Path:
    """A new project, with a peer that answers when the test wants it to, and a task that waits for as long."""
    write(directory, make_pages("shop"))
    service = directory / "shop/service.py"
    assert "PATIENCE_S = 10" in service.read_text()
    service.write_text(service.read_text().replace("PATIENCE_S = 10", "PATIENCE_S = 3600"))
    (directory / "shop/prices.py").write_text(GATED)
    return directory


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    yield make_project(tmp_path / "shop")
    assert wait_stopped(tmp_path / "shop/.coatcheck")


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One that serves several tests, each of which leaves it as it was: everybody runs, all is answered."""
    project = make_project(tmp_path_factory.mktemp("dev") / "shop")
    with Dev(*APPS, cwd=project, environ={"COATCHECK_GRACE": "0.2"}) as running:
        names = ("shop-1", "shop-2", "shop-prices-1", "shop-prices-2", "sweeper")
        running.wait_for_all(*(rf"^{name} .*_started" for name in names))
        yield running
    assert wait_stopped(project / ".coatcheck")


def park(dev: Dev, gate: str) -> str:
    """Submit a task that waits for its gate, and return its id when it is parked."""
    task_id = dev.run("submit", "shop", f'{{"item": "{gate}"}}').strip()
    dev.wait_for(rf"task_parked +{task_id[:8]}")
    return task_id


# --- on the embedded default ---


def test_every_command_finds_the_server_from_a_directory_below(dev: Dev):
    below = dev.cwd / "docs/drafts"
    below.mkdir(parents=True)

    quote = dev.json("submit", "shop", '{"item": "hat", "count": 2}', "--wait", cwd=below)
    doomed = dev.run("submit", "shop", '{"item": "gated-for-ever"}', cwd=below).strip()
    commands = [
        ("result", quote["task_id"]),
        ("show", quote["task_id"][:8]),
        ("ps", "--all"),
        ("dead", "ls", "shop"),
        ("cancel", doomed, "--wait"),
        ("doctor",),
    ]
    with ThreadPoolExecutor(2) as pool:
        result, show, ps, dead, cancel, doctor = pool.map(lambda words: dev.json(*words, cwd=below), commands)

    assert quote["result"] == {"item": "hat", "count": 2, "cents": 600, "note": ""}
    assert result["result"] == quote["result"]
    assert show["state"] == "done"
    assert {each["task_id"] for each in ps} >= {quote["task_id"], doomed}
    assert dead["total"] == 0
    assert cancel["state"] == "cancelled"
    assert doctor["is_ok"], doctor
    assert not (below / ".coatcheck").exists()


def test_a_second_one_says_whose_company_it_is_in(dev: Dev):
    with Dev("shop.prices:app", "--no-reload", cwd=dev.cwd) as second:
        second.wait_for("^dev .* shop-prices has 2 workers already, of another")
        second.wait_for("^w1 .*worker_started")
        second.signal(signal.SIGTERM)
        code = second.end()

    assert code == 0
    assert not [line for line in dev.lines if "already, of another" in line]


def test_a_parked_task_outlives_broken_code_and_goes_on_with_the_new(dev: Dev):
    service, pids = dev.cwd / "shop/service.py", dev.pids()
    before = service.read_text()
    task_id = park(dev, "gated-by-reload")

    service.write_text(f"{before}\ndef oh dear\n")
    dev.wait_for(r"^dev .*def oh dear")
    dev.wait_for(r"^dev .*SyntaxError")
    dev.wait_for(r"^dev .*service\.py changed, but cannot be imported; the old code goes on")
    answer = dev.json("submit", "shop", '{"item": "hat"}', "--wait")
    same_pids = dev.pids()
    service.write_text(before.replace("return Quote(item, count, await", "return Quote(f'new {item}', count, await"))
    told = dev.wait_for(r"^dev .*service\.py changed")
    dev.wait_for(r"^dev .*the new code runs")
    (dev.cwd / "gated-by-reload").touch()
    found = dev.json("result", task_id, "--timeout", "60")

    assert answer["result"]["item"] == "hat"
    assert same_pids == pids
    assert told.endswith("service.py changed; 1 task waits and goes on with it")
    assert found["result"]["item"] == "new gated-by-reload"
    assert len(dev.pids()) == len(pids)
    assert len({*dev.pids()} & {*pids}) == 1  # the sweeper's


def test_a_killed_replica_comes_back_and_its_task_is_answered(dev: Dev):
    task_id = park(dev, "gated-by-kill")
    for name in ("shop-1", "shop-2"):
        os.kill(dev.pid_of(name), signal.SIGKILL)

    dev.wait_for_all(
        r"^dev .*shop-1 \(pid \d+\) was killed by SIGKILL; it starts again in 0\.5 s",
        r"^dev .*shop-2 \(pid \d+\) was killed by SIGKILL; it starts again in 0\.5 s",
        r"^shop-1 .*worker_started",
        r"^shop-2 .*worker_started",
    )
    (dev.cwd / "gated-by-kill").touch()

    assert dev.json("result", task_id, "--timeout", "60")["state"] == "done"


def test_the_banner_tells_what_to_type_and_no_password(dev: Dev):
    password = (dev.cwd / ".coatcheck/postgres/password").read_text().strip()
    banner = "\n".join(dev.lines[:9])

    assert "runs    shop (2 workers), shop-prices (2 workers) and a sweeper" in banner
    assert "data    .coatcheck/" in banner
    assert """submit  coatcheck submit shop '{"item": "…"}' --wait""" in banner
    assert 'psql    PGPASSWORD="$(cat .coatcheck/postgres/password)" psql -h 127.0.0.1 -p ' in banner
    assert password not in "\n".join(dev.lines)


def test_ctrl_c_stops_everything_in_order(project: Path):
    with Dev(APPS[0], "--replicas", "2", cwd=project, on_terminal=True) as dev:
        dev.wait_for_all(r"^w1 .*worker_started", r"^w2 .*worker_started", r"^sweeper .*sweeper_started")
        workers, servers = dev.pids(), server_pids(project)
        dev.type(b"\x03")
        code = dev.end()
        dev.wait_for_all(r"^w1 .*worker_stopped", r"^w2 .*worker_stopped")
        dev.wait_for(r"^sweeper .*sweeper_stopped")

    assert code == 0
    assert len(workers) == 3
    assert len(servers) > 1
    until(lambda: not alive([*workers, *servers]))
    assert any(COLOUR.search(line) for line in dev.raw)
    assert not any("Traceback" in line for line in dev.lines)


def test_a_second_ctrl_c_ends_it_at_once(project: Path):
    with Dev(*APPS, "--replicas", "1", "--no-reload", cwd=project, environ={"COATCHECK_GRACE": "600"}) as dev:
        dev.wait_for_all(r"^shop-1 .*worker_started", r"^shop-prices-1 .*worker_started")
        park(dev, "gated-for-ever")
        workers, servers = dev.pids(), server_pids(project)
        dev.signal(signal.SIGINT)
        dev.wait_for(r"^dev .*stopping")
        dev.wait_for(r"^shop-1 .*worker_stopped")
        dev.signal(signal.SIGINT)
        code = dev.end()

    assert code == 130
    until(lambda: not alive([*workers, *servers]))


def test_nothing_is_left_when_dev_itself_is_killed(project: Path):
    with Dev(*APPS, "--replicas", "1", "--no-reload", cwd=project) as dev:
        dev.wait_for_all(r"^shop-1 .*worker_started", r"^shop-prices-1 .*worker_started", "sweeper_started")
        workers, servers = dev.pids(), server_pids(project)
        dev.signal(signal.SIGKILL)
        dev.end()

    assert len(workers) == 3
    assert len(servers) > 1
    until(lambda: not alive([*workers, *servers]))
    until(lambda: not is_served(project))


# --- on servers that were named ---


def test_named_servers_are_used_and_migrated_on_request(cli: Cli, empty_store_url: str, service_name: str, here: Path):
    environ = {**cli.environ, "COATCHECK_STORE": empty_store_url, "TEST_SERVICE": service_name}
    refused = Cli(environ).run("dev", "service:app", cwd=here)
    with Dev("service:app", "--replicas", "1", "--migrate", cwd=here, environ=environ) as dev:
        dev.wait_for(r"^  store +postgresql://")
        dev.wait_for_all(r"^w1 .*worker_started", r"^sweeper .*sweeper_started")
        answer = dev.json("submit", service_name, '"you"', "--wait")
        dev.signal(signal.SIGTERM)
        code = dev.end()

    assert refused.returncode == 1
    assert refused.stderr.strip().endswith("has no coatcheck schema; run `coatcheck migrate`")
    assert answer["result"] == "hello you"
    assert code == 0
    assert not (here / ".coatcheck").exists()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "service.py").write_text(
        "import os\nfrom coatcheck.worker import App, Context\napp = App(os.environ['TEST_SERVICE'])\n"
        "@app.task\nasync def hello(ctx: Context, name: str) -> str:\n    return f'hello {name}'\n"
    )
    return tmp_path


# --- what cannot start ---


def test_what_cannot_start_says_why_and_makes_nothing(bare_cli: Cli, tmp_path: Path):
    cli = Cli({})
    (tmp_path / "broken.py").write_text("raise KeyError('nothing here')\n")
    (tmp_path / "two.py").write_text("from coatcheck.worker import App\none = App('same')\nother = App('same')\n")
    wrong = [("nowhere:app",), ("broken:app", "--no-reload"), ("two:one", "two:other")]
    with ThreadPoolExecutor(2) as pool:
        missing, broken, twice = pool.map(lambda words: cli.run("dev", *words, cwd=tmp_path), wrong)

    assert (missing.returncode, broken.returncode, twice.returncode) == (2, 1, 2)
    assert "there is no module 'nowhere'" in missing.stderr
    assert "broken cannot be imported: KeyError: 'nothing here'" in broken.stderr
    assert "two:one and two:other are both called 'same'" in twice.stderr
    assert not (tmp_path / ".coatcheck").exists()


def test_code_that_is_broken_from_the_start_is_waited_for(bare_cli: Cli, here: Path):
    good = (here / "service.py").read_text()
    (here / "service.py").write_text("import nothing_at_all\n")
    with Dev("service:app", cwd=here, environ={**bare_cli.environ, "TEST_SERVICE": "shop"}) as dev:
        dev.wait_for(r"^dev .*No module named 'nothing_at_all'")
        dev.wait_for(r"^dev .*it starts when the code is mended")
        (here / "service.py").write_text(good)
        dev.wait_for("^Error: .*Postgres")  # it goes on, and comes to the server that is not there
        assert dev.end() == 1


def test_without_watchfiles_it_says_how_to_get_it(bare_cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "watchfiles", None)

    result = bare_cli("dev", "service:app")

    assert result.exit_code == 1
    assert "pip install 'coatcheck[embedded]', or add --no-reload" in result.stderr


async def test_an_app_is_described_without_being_imported_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.py").write_text(
        "from coatcheck.worker import App\nprint('noise')\napp = App('shop')\n"
        "@app.task\nasync def quote(ctx, item: str, sizes: list[int], count: int = 1): ...\n"
    )
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit()\n")

    offer, left = await asyncio.gather(
        probe("service:app", environ=os.environ), probe("leaves:app", environ=os.environ)
    )

    assert offer == Offer("service:app", "shop", ("quote",), '{"item": "…", "sizes": [1]}')
    assert isinstance(left, Broken)
    assert "called sys.exit(None) while it was imported" in left.text


# --- processes that die ---


def test_without_reload_it_ends_when_no_worker_is_left(cli: Cli, here: Path, service_name: str):
    death = "\nimport sys\nif 'worker' in sys.argv[1:] or 'worker' in sys.orig_argv:\n    os._exit(3)\n"
    (here / "service.py").write_text((here / "service.py").read_text() + death)
    environ = {**cli.environ, "TEST_SERVICE": service_name}

    result = Cli(environ).run("dev", "service:app", "--replicas", "1", "--no-reload", cwd=here)

    assert result.returncode == 1
    assert result.stdout.count("ended with code 3") == 3
    assert result.stderr == "Error: no worker is left; what they said is above\n"


async def test_a_worker_that_never_starts_is_left_alone_until_the_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(crews, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(crews, "MOST_FALSE_STARTS", 2)
    offer = Offer("nowhere:app", "shop", (), "")
    screen = Screen.on_stdout(level=LogLevel.INFO)

    async with DevCrew(
        [offer], Settings(checkpointing=Checkpointing.OFF), replica_count=1, environ=os.environ, screen=screen
    ) as crew:
        await crew.lost()
        before = capsys.readouterr().out
        is_renewed = await crew.renew()
        after = capsys.readouterr().out

    assert before.count("there is no module 'nowhere'") == 2
    assert len(re.findall(r"w1 \(pid \d+\) ended with code 2; it starts again", before)) == 1
    assert re.search(r"w1 \(pid \d+\) ended with code 2 before it had started, 2 times in a row; it is left", before)
    assert "there is no module 'nowhere'" in after
    assert not is_renewed


async def test_code_that_breaks_in_the_middle_of_a_reload_leaves_the_old_workers_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The code was fine when it was looked at, and is not when the new worker reads it."""
    monkeypatch.chdir(tmp_path)
    service = "from coatcheck.worker import App\napp = App('shop')\n@app.task\nasync def quote(ctx): ...\n"
    (tmp_path / "service.py").write_text(service)
    offer = Offer("service:app", "shop", ("quote",), "")
    screen = Screen.on_stdout(level=LogLevel.INFO)
    settings = Settings(checkpointing=Checkpointing.OFF, broker="memory://")
    environ = make_environ(settings, broker="memory://", store="postgresql://localhost/none")
    environ |= {"COATCHECK_CHECKPOINTING": "off"}

    async with asyncio.timeout(60), DevCrew([offer], settings, replica_count=1, environ=environ, screen=screen) as crew:
        said = ""
        while "worker_started" not in said:
            await asyncio.sleep(0.05)
            said += capsys.readouterr().out
        pid = int(re.findall(r"pid=(\d+)", said)[0])
        (tmp_path / "service.py").write_text(f"{service}def broken(:\n")
        is_renewed, is_alive = await crew.renew(), bool(alive([pid]))
        complaint = capsys.readouterr().out
        (tmp_path / "service.py").write_text(service)
        is_renewed_later, is_old_alive = await crew.renew(), bool(alive([pid]))

    assert (is_renewed, is_alive) == (False, True)
    assert 'service.py", line 5' in complaint
    assert "SyntaxError" in complaint
    assert (is_renewed_later, is_old_alive) == (True, False)


def test_pauses_grow_and_a_long_life_is_forgiven():
    deaths = Deaths()

    pauses = [deaths.add(has_started=True, lived_s=1) for _ in range(7)]

    assert pauses == [0.5, 1, 2, 4, 8, 10, 10]
    assert deaths.add(has_started=True, lived_s=60) == 0.5


def test_only_starts_that_fail_in_a_row_are_given_up():
    deaths = Deaths()

    assert deaths.add(has_started=False, lived_s=1) is not None
    assert deaths.add(has_started=False, lived_s=1) is not None
    assert deaths.add(has_started=True, lived_s=1) is not None
    assert deaths.add(has_started=False, lived_s=1) is not None
    assert deaths.add(has_started=False, lived_s=1) is not None
    assert deaths.add(has_started=False, lived_s=1) is None


def test_an_end_is_told_in_words():
    assert describe_end(3) == "ended with code 3"
    assert describe_end(-9) == "was killed by SIGKILL"
    assert describe_end(-64) == "was killed by SIGRTMAX"
    assert describe_end(-63) == "was killed by signal 63"


def test_replicas_are_called_by_their_service_where_there_are_several():
    assert names_of("shop", 2, is_alone=True) == ["w1", "w2"]
    assert names_of("shop", 2, is_alone=False) == ["shop-1", "shop-2"]
