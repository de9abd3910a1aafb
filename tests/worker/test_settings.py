from __future__ import annotations

import dataclasses
import warnings
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.errors import InvalidSettings
from coatcheck.worker.redaction import redacted_ends, redacted_start
from coatcheck.worker.settings import (
    ENVIRONMENT,
    Checkpointing,
    LogFormat,
    LogLevel,
    Settings,
    SettingsWarning,
    redacted,
)


def load(environ=None, **overrides):
    return Settings.load(environ=environ or {}, **overrides)


def test_defaults_need_no_environment():
    settings = load()

    assert settings.broker == "pg://"
    assert settings.store == "embedded://"
    assert settings.lease == timedelta(seconds=60)
    assert settings.checkpointing is Checkpointing.REQUIRED
    assert settings == Settings()


def test_override_wins_over_environment_and_environment_over_default():
    environ = {"COATCHECK_CONCURRENCY": "7", "COATCHECK_LEASE": "30"}

    settings = load(environ, concurrency=9, grace=None)

    assert (settings.concurrency, settings.lease) == (9, timedelta(seconds=30))
    assert settings.grace == timedelta(seconds=30)


def test_process_environment_is_the_default_source(monkeypatch):
    monkeypatch.setenv("COATCHECK_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("COATCHECK_LOG_FORMAT", "")

    settings = Settings.load()

    assert settings.log_level is LogLevel.DEBUG
    assert settings.log_format is None


def test_requests_in_hand_follow_concurrency_unless_set():
    assert load(concurrency=20).request_prefetch == 20
    assert load(concurrency=20, request_prefetch=5).request_prefetch == 5


def test_processes_may_be_left_to_the_machine():
    assert [load(processes=it).processes for it in ("auto", " Auto ", 0, "3")] == [0, 0, 0, 3]


def test_address_may_be_in_a_file(tmp_path):
    file = tmp_path / "broker"
    file.write_text("amqp://me:hush@example.net/\n")

    assert load({"COATCHECK_BROKER": f"@{file}"}).broker == "amqp://me:hush@example.net/"
    assert load(broker=f" @{file}").broker == "amqp://me:hush@example.net/"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "the file cannot be read: No such file"),
        (b"\xff\xfe", "the file cannot be read: it is no text"),
        (b"hush", "the file must have a URL that begins with amqp://"),
        (b"", "the file must have a URL"),
        (b"amqp://me:hush@example.net/\namqp://you:hush@example.net/", "one line, with a URL and nothing else"),
        (b"amqp://" + b"hush" * 5000, "one line, with a URL and nothing else"),
        (b"@/etc/hush", "the file must have a URL"),
    ],
)
def test_file_without_an_address_is_named_and_not_quoted(tmp_path, content, text):
    file = tmp_path / "broker"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(InvalidSettings) as caught:
        load({"COATCHECK_BROKER": f"@{file}"})

    assert f"COATCHECK_BROKER=@{file}: " in str(caught.value)
    assert text in str(caught.value)
    assert "hush" not in str(caught.value)


def test_every_field_has_one_described_variable():
    expected = {f"COATCHECK_{field.name.upper()}" for field in dataclasses.fields(Settings)}

    assert set(ENVIRONMENT) == expected
    assert all(ENVIRONMENT.values())


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30", 30),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("30s", 30),
        (" 5m ", 300),
        ("0.5 h", 1800),
        ("1H", 3600),
        (45, 45),
        (0.25, 0.25),
        (timedelta(seconds=2), 2),
    ],
)
def test_durations(written, seconds):
    assert load(lease=written).lease == timedelta(seconds=seconds)


def test_days():
    assert load({"COATCHECK_KEEP_FAILURES": "2d"}).keep_failures == timedelta(days=2)


@pytest.mark.parametrize(("written", "size"), [("2048", 2048), ("64KB", 65536), ("1 MiB", 1048576), ("2m", 2097152)])
def test_sizes(written, size):
    assert load({"COATCHECK_MAX_BODY": written}).max_body == size


@pytest.mark.parametrize(
    ("variable", "written", "text"),
    [
        ("CONCURRENCY", "many", "COATCHECK_CONCURRENCY=many: must be a whole number"),
        ("CONCURRENCY", "0", "COATCHECK_CONCURRENCY=0: must be between 1 and 65535"),
        ("CONCURRENCY", "70000", "COATCHECK_CONCURRENCY=70000: must be between 1 and 65535"),
        ("CONCURRENCY", "1" * 400, "must be a whole number"),
        ("CONCURRENCY", "___", "must be a whole number"),
        ("LEASE", "soon", "COATCHECK_LEASE=soon: must be a duration"),
        ("LEASE", "-5", "COATCHECK_LEASE=-5: must be a duration"),
        ("LEASE", "5w", "COATCHECK_LEASE=5w: must be a duration"),
        ("LEASE", "nan", "COATCHECK_LEASE=nan: must be a duration"),
        ("LEASE", "2h", "COATCHECK_LEASE=2h: must be between 0.1s and 1h"),
        ("LONG_RUN_LIMIT", "29m", "must be between 0.1s and 25m"),
        ("KEEP_FAILURES", "999999999999d", "must be"),
        ("MAX_BODY", "1TB", "COATCHECK_MAX_BODY=1TB: must be a size"),
        ("HEALTH_PORT", "99999", "COATCHECK_HEALTH_PORT=99999: must be between 0 and 65535"),
        ("PROCESSES", "-1", "COATCHECK_PROCESSES=-1: must be between 0 and 1024"),
        ("LOOP", "trio", "COATCHECK_LOOP=trio: must be one of auto, asyncio, uvloop"),
        ("LOG_LEVEL", "loud", "COATCHECK_LOG_LEVEL=loud: must be one of debug, info, warning, error"),
        ("CHECKPOINTING", "maybe", "COATCHECK_CHECKPOINTING=maybe: must be one of required, preferred, off"),
        ("BROKER", "localhost", "COATCHECK_BROKER=localhost: must be a URL that begins with amqp://"),
        ("STORE", "mysql://a:b@c/d", r"COATCHECK_STORE=mysql://a:\*\*\*@c/d: must be a URL"),
    ],
)
def test_bad_value_is_refused_with_variable_value_and_limit(variable, written, text):
    with pytest.raises(InvalidSettings, match=text):
        load({f"COATCHECK_{variable}": written})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"concurency": 5}, "no setting `concurency`; did you mean concurrency"),
        ({"concurrency": True}, "concurrency=True: must be a whole number"),
        ({"concurrency": 1.5}, "concurrency=1.5: must be a whole number"),
        ({"lease": True}, "lease=True: must be a duration"),
        ({"lease": float("nan")}, "lease=nan: must be a duration"),
        ({"lease": float("inf")}, "lease=inf: must be a duration"),
        ({"health_host": " "}, "health_host= : must be a text"),
        ({"checkpoint_warn": "3MB"}, "checkpoint_warn=3145728: must not exceed checkpoint_refuse=2097152"),
        ({"keep_failures": "1h"}, "keep_failures=1h: must not be shorter than dedup_window=1d"),
        ({"store": "memory://"}, "store=memory://: its tasks live in this process, and broker=pg:// would"),
        (
            {"store": "memory://", "broker": "amqp://me:secret@host/"},
            r"broker=amqp://me:\*\*\*@host/ would .*set COATCHECK_BROKER=memory://, or keep tasks in Postgres",
        ),
        ({"broker": "memory://", "processes": 2}, "processes=2: must be 1 with broker=memory://"),
        ({"broker": "memory://", "processes": "auto"}, "processes=auto: must be 1 with broker=memory://"),
    ],
)
def test_bad_override_is_refused_by_its_name(overrides, text):
    with pytest.raises(InvalidSettings, match=text):
        load(**overrides)


@pytest.mark.parametrize("store", ["memory://", "memory://mine", "postgresql://localhost/db", "embedded://"])
def test_broker_in_memory_may_have_any_store(store):
    assert load(broker="memory://", store=store).store == store


def test_required_field_cannot_be_none():
    with pytest.raises(InvalidSettings, match="lease=None"):
        Settings(lease=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("COATCHECK_BROKR", "COATCHECK_BROKR has no effect; did you mean COATCHECK_BROKER?"),
        ("COATCHECK_LEASES", "did you mean COATCHECK_LEASE?"),
        ("COATCHECK_ZZZZZZZZZZZZZZZZZZZZ", "has no effect$"),
    ],
)
def test_unknown_variable_warns_with_the_nearest_name(variable, text):
    with pytest.warns(SettingsWarning, match=text):
        load({variable: "1"})


@pytest.mark.parametrize("variable", ["COATCHECK_TEST_AMQP", "COATCHECK_CRASH", "COATCHECK_PG_BIN", "PATH", "OTHER_X"])
def test_variables_of_others_are_left_alone(variable):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load({variable: "x"}) == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amqp://user:hunter2@host:5672/vhost", "amqp://user:***@host:5672/vhost"),
        ("amqp://user:hun@ter2@host/", "amqp://user:***@host/"),
        ("amqp://user:hun/ter2@host/", "amqp://user:***@host/"),
        ("amqp://:hunter2@host/", "amqp://:***@host/"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://u@h/db?password=hunter2&x=1", "postgresql://u@h/db?password=***&x=1"),
        ("postgresql://u:hunter2@h1:1,h2:2/db", "postgresql://u:***@h1:1,h2:2/db"),
        ("cannot reach amqp://u:hunter2@h/ now, mail a@b.c", "cannot reach amqp://u:***@h/ now, mail a@b.c"),
        ("host=h user=u password=hunter2 dbname=d", "host=h user=u password=*** dbname=d"),
        ("host=h password='hunter2 of mine' dbname=d", "host=h password=*** dbname=d"),
        ('host=h password="hunter2" dbname=d', "host=h password=*** dbname=d"),
        (r"password='it\'s hunter2' dbname=d", "password=*** dbname=d"),
        ("password='hunter2, and no end", "password=***"),
        ("GET /?access_token=hunter2&client_secret=hunter2&x=1", "GET /?access_token=***&client_secret=***&x=1"),
        ("nothing secret", "nothing secret"),
    ],
)
def test_redacted(text, expected):
    assert redacted(text) == expected


@given(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=8).map(lambda text: f"\u00df{text}\u00df"))
def test_redacted_never_shows_a_password_without_blanks(password):
    assert password not in redacted(f"amqp://user:{password}@host:5672/")


@given(st.integers(1, 60), st.sampled_from(["amqp://user:hunter2hunter2@host/", "x password=hunter2hunter2 y"]))
def test_password_that_a_cut_divides_stays_hidden(limit, secret):
    text = f"cannot reach {secret} now"

    assert "hunter" not in redacted_start(text, limit)
    assert "unter2" not in redacted_ends(text, limit)


def test_address_of_many_parts_is_hidden_to_its_last_sign():
    text = f"http://docs/,amqp://u:{'p:/@' * 5000}secret@host then amqp://h:5672/ and a@b"

    assert redacted(text) == "http://docs/,amqp://u:***@host then amqp://h:5672/ and a@b"


def test_printed_settings_hold_no_password():
    settings = load(broker="amqp://u:hunter2@h/", store="postgresql://u:hunter2@h/d", log_format="json")

    assert "hunter2" not in repr(settings) + str(settings.describe())
    assert settings.describe()["lease"] == "1m"
    assert settings.log_format is LogFormat.JSON
