"""What `compose.yaml` and the `Dockerfile` promise, read from the files themselves: that needs no Docker."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
CONSUMERS = ("worker", "sweeper")
OURS = (*CONSUMERS, "migrate", "peer")
SECRET_NAME = re.compile(r"PASS|SECRET|TOKEN|KEY|CREDENTIAL", re.IGNORECASE)
PINNED = re.compile(r"[a-z]+:\d[\w.-]+@sha256:[0-9a-f]{64}")
URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return compose["services"]


@pytest.fixture(scope="module")
def stages() -> list[list[str]]:
    return read_stages(ROOT / "Dockerfile")


def read_stages(dockerfile: Path) -> list[list[str]]:
    """A Dockerfile's instructions, one list per stage."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    _, *stages = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)
    return [[line for line in stage.splitlines() if line.strip()] for stage in stages]


@pytest.fixture(scope="module")
def images() -> list[str]:
    """Every image that is run or built upon, here and in the projects that `coatcheck new` makes."""
    templates = ROOT / "worker/coatcheck/cli/templates"
    composed = [ROOT / "compose.yaml", templates / "compose.yaml.tmpl", ROOT / "tests/services.py"]
    named = [
        image
        for path in composed
        for image in re.findall(r"""^(?: +image: |\w+_IMAGE = ")([^\s"]+)""", path.read_text(), flags=re.MULTILINE)
        if not image.endswith(":local")  # built from these sources
    ]
    return named + [base for path in (ROOT / "Dockerfile", templates / "Dockerfile.tmpl") for base in read_bases(path)]


def read_bases(dockerfile: Path) -> list[str]:
    """What a Dockerfile's stages are built upon, its arguments put in."""
    text = dockerfile.read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, flags=re.MULTILINE))
    bases = re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)
    return [re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], base) for base in bases]


def test_images_are_pinned_by_digest(images):
    assert {image.partition(":")[0] for image in images} == {"postgres", "rabbitmq", "python"}
    assert [image for image in images if not PINNED.fullmatch(image)] == []


def test_an_image_has_one_digest_everywhere(images):
    assert len(set(images)) == len({image.partition("@")[0] for image in images})


def test_every_part_of_the_system_is_there(services):
    assert set(services) == {"rabbitmq", "postgres", *OURS}
    assert "management" in services["rabbitmq"]["image"]


@pytest.mark.parametrize("name", ["rabbitmq", "postgres", *CONSUMERS])
def test_long_lived_servers_have_a_health_check(services, name):
    assert services[name]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers_are_healthy_when_they_say_they_are_ready(services, name):
    probe = services[name]["healthcheck"]["test"]

    assert probe[1:3] == ["python", "-c"]
    compile(probe[3], "healthcheck", "exec")
    assert "/readyz" in probe[3]
    assert "COATCHECK_HEALTH_PORT" in probe[3]
    assert "COATCHECK_HEALTH_PORT" in services[name]["environment"]


@pytest.mark.parametrize("name", OURS)
def test_services_wait_for_what_they_need(services, name):
    for needed, condition in services[name]["depends_on"].items():
        expected = "service_completed_successfully" if needed == "migrate" else "service_healthy"
        assert condition == {"condition": expected}


@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers_start_after_the_migration(services, name):
    assert set(services[name]["depends_on"]) == {"rabbitmq", "postgres", "migrate"}


def test_migration_runs_once(services):
    assert services["migrate"]["restart"] == "no"


@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers_may_finish_draining_before_they_are_killed(services, name):
    grace_s = float(services[name]["environment"]["COATCHECK_GRACE"])

    assert services[name]["stop_signal"] == "SIGTERM"
    assert _seconds(services[name]["stop_grace_period"]) > grace_s


def test_worker_can_be_scaled(services):
    assert "container_name" not in services["worker"]
    assert "ports" not in services["worker"]


def test_published_ports_stay_on_the_loopback_interface(services):
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", [*CONSUMERS, "migrate"])
def test_commands_exist_on_our_command_line(services, name):
    from coatcheck.cli.main import COMMANDS

    program, verb, *_ = services[name]["command"]

    assert program == "coatcheck"
    assert verb in COMMANDS


def test_worker_and_peer_run_examples_of_this_repository(services):
    application = services["worker"]["command"][-1].partition(":")[0]
    peer = services["peer"]["command"][-1]

    for module in (application, peer):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("name", OURS)
def test_settings_are_known_to_the_code(services, name):
    from coatcheck.worker.settings import ENVIRONMENT

    assert set(services[name]["environment"]) <= set(ENVIRONMENT)


def test_no_secret_is_written_down(services):
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            assert not SECRET_NAME.search(name) or str(value).startswith("${")
            assert not URL_WITH_PASSWORD.search(str(value))


@pytest.mark.parametrize("name", OURS)
def test_containers_have_no_rights_to_spare(services, name):
    assert services[name]["cap_drop"] == ["ALL"]
    assert services[name]["read_only"] is True


def test_image_leaves_its_build_tools_behind(stages):
    *_, final = stages

    assert len(stages) == 2
    assert not any("pip" in line for line in final)
    assert any(line.startswith("COPY --from=build") for line in final)


def test_image_installs_only_what_the_lock_names(stages):
    installs = [step for line in stages[0] for step in line.split("&&") if " pip install " in step]

    assert installs
    assert all("--require-hashes" in step or "--no-deps --no-index" in step for step in installs)


def test_image_runs_unprivileged_and_stops_on_sigterm(stages):
    *_, final = stages
    user = next(line.split()[1] for line in final if line.startswith("USER"))

    assert user not in {"root", "0"}
    assert "STOPSIGNAL SIGTERM" in final


def test_image_copies_what_exists_and_is_not_ignored(stages):
    allowed = {line[1:].rstrip("/") for line in _lines(".dockerignore") if line.startswith("!")}
    copies = [
        line.split()[1:-1] for stage in stages for line in stage if line.startswith("COPY ") and "--from" not in line
    ]

    for source in (name for sources in copies for name in sources):
        assert (ROOT / source).exists()
        assert source.split("/")[0] in allowed


def _seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, f"expected whole seconds, found {duration!r}"
    return float(match[1])


def _lines(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()
