"""A connection to another machine without verified TLS is said once at the start, and by the doctor, unless allowed."""

from datetime import timedelta
from typing import Any

import pytest
import structlog
from tests.cli.kit import Cli
from tests.flow.harness import Rig
from tests.flow.outages import listen

from coatcheck.errors import InvalidSettings
from coatcheck.tls import is_local
from coatcheck.worker import App, Checkpointing, Settings
from coatcheck.worker.servers import find_exposures

LOCAL_BROKER, LOCAL_STORE = "amqp://localhost/", "postgresql://localhost/db"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "a.localhost",
        "127.0.0.1",
        "127.8.8.8",
        "::1",
        "[::1]",
        "",
        None,
        "/run/pg",
    ],
)
def test_this_machine_is_local(host: str | None):
    assert is_local(host)


@pytest.mark.parametrize(
    "host", ["rabbitmq", "10.0.0.1", "192.168.0.7", "example.net", "localhost.example.net", "::2", "0.0.0.0"]
)
def test_any_other_is_not(host: str):
    assert not is_local(host)


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ("amqp://rabbitmq/", "not encrypted; use amqps://"),
        ("amqps://rabbitmq/?verify=verify_none", "not verified"),
        ("amqps://rabbitmq/", None),
        ("amqp://127.0.0.1/", None),
        ("amqp://[::1]:5672/", None),
        ("amqps://localhost/?verify=verify_none", None),
        ("memory://anything", None),
    ],
)
def test_broker_is_exposed_without_verified_tls(broker: str, words: str | None):
    found = find_exposures(Settings(broker=broker, store=LOCAL_STORE))

    assert [each.setting for each in found] == (["COATCHECK_BROKER"] if words else [])
    assert all(words in each.risk for each in found if words)


def test_store_in_memory_is_not_exposed():
    assert not find_exposures(Settings(broker="memory://", store="memory://"))


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("postgresql://pg/db", "not encrypted for certain; use sslmode=verify-full"),
        ("postgresql://pg/db?sslmode=prefer", "not encrypted for certain"),
        ("postgresql://pg/db?sslmode=disable", "not encrypted for certain"),
        ("postgresql://pg/db?sslmode=require", "not verified; use sslmode=verify-full"),
        ("postgresql://pg/db?sslmode=verify-ca", None),
        ("postgresql://pg/db?sslmode=verify-full", None),
        ("postgresql://localhost/db", None),
        ("postgresql:///db?host=/run/postgresql", None),
        ("postgresql:///db?host=pg", "not encrypted for certain"),
    ],
)
def test_store_is_exposed_without_verified_tls(store: str, words: str | None):
    found = find_exposures(Settings(broker=LOCAL_BROKER, store=store))

    assert [each.setting for each in found] == (["COATCHECK_STORE"] if words else [])
    assert all(words in each.risk for each in found if words)


def test_network_that_encrypts_by_itself_is_not_warned_of():
    exposed: dict[str, Any] = {"broker": "amqp://rabbitmq/", "store": "postgresql://pg/db"}

    assert len(find_exposures(Settings(**exposed))) == 2
    assert find_exposures(Settings(**exposed, allow_plaintext=True)) == []
    assert len(find_exposures(Settings(**exposed, checkpointing=Checkpointing.OFF))) == 1


def test_flag_is_read_from_the_environment():
    for text, value in {
        "true": True,
        "YES": True,
        "1": True,
        "on": True,
        "false": False,
        "0": False,
        "": False,
    }.items():
        assert Settings.load(environ={"COATCHECK_ALLOW_PLAINTEXT": text}).allow_plaintext is value
    with pytest.raises(InvalidSettings, match="COATCHECK_ALLOW_PLAINTEXT=maybe: must be true or false"):
        Settings.load(environ={"COATCHECK_ALLOW_PLAINTEXT": "maybe"})


async def test_worker_and_sweeper_warn_once_at_the_start(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """To the test's servers on this machine, which count as another one here."""
    heard = listen(rig)
    monkeypatch.setattr("coatcheck.tls.is_local", lambda host: False)
    await rig.replica(App(rig.names.new()))
    await rig.sweeper()
    await heard.hears("sweeper_started")

    found = heard.all("connection_exposed")
    by_process = [(each["replica"].startswith("sweeper"), each["setting"]) for each in found]
    assert sorted(by_process) == [
        (False, "COATCHECK_BROKER"),
        (False, "COATCHECK_STORE"),
        (True, "COATCHECK_BROKER"),
        (True, "COATCHECK_STORE"),
    ]
    assert {each["log_level"] for each in found} == {"warning"}
    assert all("COATCHECK_ALLOW_PLAINTEXT=true" in each["silence"] for each in found)
    structlog.reset_defaults()


def test_doctor_warns_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coatcheck.cli.doctor.CONNECT_BUDGET", timedelta(seconds=0.1))
    exposed = {"COATCHECK_BROKER": "amqp://rabbitmq.invalid/", "COATCHECK_STORE": "postgresql://pg.invalid/db"}

    told = Cli(exposed).json("doctor", exit_code=1)["findings"]
    silenced = Cli(exposed | {"COATCHECK_ALLOW_PLAINTEXT": "true"}).json("doctor", exit_code=1)["findings"]

    warned = [each for each in told if each["check"] == "encryption"]
    assert [each["status"] for each in warned] == ["warn", "warn"]
    assert "use amqps://" in warned[0]["what"]
    assert "use sslmode=verify-full" in warned[1]["what"]
    assert all("COATCHECK_ALLOW_PLAINTEXT=true" in each["fix"] for each in warned)
    assert [each["status"] for each in silenced if each["check"] == "encryption"] == ["ok"]
