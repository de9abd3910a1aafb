"""The project that `coatcheck new` writes: it is what it says, its tests pass, and it overwrites nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import test_compose as promises
from tests.cli.kit import Cli

from coatcheck.broker import Names
from coatcheck.cli.apps import load_app
from coatcheck.cli.new import TEMPLATES, make_pages, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("new") / "shop"
    write(directory, make_pages("shop"))
    return directory


@pytest.fixture(scope="module")
def services(project: Path) -> dict[str, Any]:
    return yaml.safe_load((project / "compose.yaml").read_text())["services"]


# --- the command ---


def test_a_project_is_written_and_the_next_commands_are_told(bare_cli: Cli, tmp_path: Path):
    result = bare_cli("new", "shop", "--path", str(tmp_path / "here"), "--source", "index")

    written = {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert result.exit_code == 0
    assert written == {target.replace("%{name}", "shop") for target in TEMPLATES}
    assert f"cd {tmp_path / 'here'}" in result.stdout
    assert [line.split()[1] for line in result.stdout.splitlines()[3:]] == ["setup", "test", "dev", "submit"]


def test_the_directory_is_called_like_the_project_unless_told_otherwise(
    bare_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    assert bare_cli("new", "shop", "--source", "index").exit_code == 0
    assert (tmp_path / "shop/shop/service.py").is_file()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my-shop", "try my_shop"),
        ("Shop", "try shop"),
        ("2shops", "try shops"),
        ("läden", "beginning with a letter"),
        ("", "beginning with a letter"),
        ("a/b", "try a_b"),
        ("../up", "try up"),
        ("s" * 49, "up to 48"),
        ("class", "try class_service"),
        ("match", "try match_service"),
        ("json", "try json_service"),
        ("coatcheck", "try coatcheck_service"),
        ("click", "a package of click"),
    ],
)
def test_a_name_that_will_not_do_is_refused_with_one_that_would(
    bare_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
):
    monkeypatch.chdir(tmp_path)
    result = bare_cli("new", "--", name)

    assert result.exit_code == 2
    assert "will not do" in result.stderr
    assert hint in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way_is_listed_and_nothing_is_written(bare_cli: Cli, tmp_path: Path):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "Makefile").symlink_to("nowhere")
    (tmp_path / "notes.txt").write_text("mine too")

    result = bare_cli("new", "shop", "--path", str(tmp_path), "--source", str(ROOT))

    assert result.exit_code == 1
    assert [line.strip() for line in result.stderr.splitlines()[1:]] == [
        str(tmp_path / "Makefile"),
        str(tmp_path / "README.md"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "Makefile", "notes.txt"}
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_directory_with_other_things_in_it_will_do(bare_cli: Cli, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")

    assert bare_cli("new", "shop", "--path", str(tmp_path), "--source", "index").exit_code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_one_line(bare_cli: Cli, tmp_path: Path):
    (tmp_path / "file").touch()

    result = bare_cli("new", "shop", "--path", str(tmp_path / "file/shop"), "--source", "index")

    assert result.exit_code == 1
    assert "cannot be written: Not a directory" in result.stderr


# --- where Coatcheck comes from ---


@pytest.fixture(scope="module")
def from_clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project made without saying where Coatcheck comes from, by one that was installed from this clone."""
    directory = tmp_path_factory.mktemp("vendored") / "shop"
    done = Cli().run("new", "shop", "--path", str(directory))
    assert done.returncode == 0, done.stderr
    return directory


def test_a_coatcheck_from_a_clone_comes_along_as_a_wheel(from_clone: Path):
    (wheel,) = (from_clone / "vendor").iterdir()
    metadata = tomllib.loads((from_clone / "pyproject.toml").read_text())["project"]

    name, version, *_ = wheel.name.split("-")
    assert name == "coatcheck"
    assert metadata["dependencies"] == [f"coatcheck>={version}"]
    with zipfile.ZipFile(wheel) as archive:
        assert "coatcheck/cli/templates/Dockerfile.tmpl" in archive.namelist()


def test_its_image_is_built_from_what_is_there(from_clone: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(promises, "ROOT", from_clone)
    build, _ = promises.read_stages(from_clone / "Dockerfile")

    promises.test_image_copies_what_exists_and_is_not_ignored([build])
    (install,) = [line for line in build if "pip install" in line]
    named = [word for word in install.split() if word.startswith("vendor/")]
    assert [(from_clone / name).is_file() for name in named] == [True]
    assert install.split()[-1] == "."


def test_nothing_in_the_project_names_the_place_it_was_made_from(from_clone: Path):
    texts = [path.read_text() for path in from_clone.rglob("*") if path.is_file() and path.suffix != ".whl"]

    assert not any(str(ROOT) in text for text in texts)


def test_a_coatcheck_from_an_index_is_asked_from_there(project: Path):
    assert not (project / "vendor").exists()
    assert "vendor" not in (project / "Dockerfile").read_text()


@pytest.mark.parametrize("source", ["nowhere", "git+https://user:s3cret@127.0.0.1:1/coatcheck.git"])
def test_a_source_that_cannot_be_built_is_told_without_its_password(bare_cli: Cli, tmp_path: Path, source: str):
    result = bare_cli("new", "shop", "--path", str(tmp_path / "shop"), "--source", source)

    assert result.exit_code == 1
    assert "is no source of Coatcheck that pip can build" in result.stderr
    assert "s3cret" not in result.output
    assert not (tmp_path / "shop").exists()


# --- the project ---


def test_every_template_is_used_and_every_mark_in_it_is_replaced(project: Path):
    there = {path.name.removesuffix(".tmpl") for path in (ROOT / "worker/coatcheck/cli/templates").iterdir()}
    texts = [path.read_text() for path in project.rglob("*") if path.is_file()]

    assert there == set(TEMPLATES.values())
    assert not any("%{" in text or "%%" in text for text in texts)


def test_its_own_tests_pass(project: Path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env=Cli().process_environ(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_its_apps_are_a_service_and_the_peer_it_calls(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(project))
    try:
        service, peer = load_app("shop.service:app"), load_app("shop.prices:app")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
            del sys.modules[name]

    assert (service.service, peer.service) == (Names("shop").service, Names("shop-prices").service)
    assert len(service.handlers) == len(peer.handlers) == 1


def test_its_code_is_clean_by_our_own_rules(project: Path):
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(project)]

    # There Coatcheck is somebody else's package, and the peer that thinks for ever is meant to.
    for command in (["check", "--ignore", "I001,INP001,ASYNC110"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_its_metadata_ask_for_this_release(project: Path):
    found = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert found["dependencies"] == [f"coatcheck>={ours['version']}"]
    assert found["requires-python"] == ours["requires-python"]


def test_make_describes_its_targets(project: Path):
    listed = subprocess.run(["make", "-s"], cwd=project, capture_output=True, text=True, check=True).stdout

    assert {line.split()[0] for line in listed.splitlines()} == {
        *("help", "setup", "dev", "test", "submit", "up", "down"),
    }


def test_its_data_are_not_for_version_control(project: Path):
    assert ".coatcheck/" in (project / ".gitignore").read_text().splitlines()


# --- its containers ---


def test_its_containers_promise_what_ours_do(services: dict[str, Any]):
    promises.test_every_part_of_the_system_is_there(services)
    promises.test_migration_runs_once(services)
    promises.test_worker_can_be_scaled(services)
    promises.test_published_ports_stay_on_the_loopback_interface(services)
    promises.test_no_secret_is_written_down(services)
    for name in (*promises.CONSUMERS, "peer"):
        promises.test_long_lived_servers_have_a_health_check(services, name)
        promises.test_consumers_are_healthy_when_they_say_they_are_ready(services, name)
        promises.test_consumers_start_after_the_migration(services, name)
        promises.test_consumers_may_finish_draining_before_they_are_killed(services, name)
        promises.test_commands_exist_on_our_command_line(services, name)
    for name in promises.OURS:
        promises.test_services_wait_for_what_they_need(services, name)
        promises.test_settings_are_known_to_the_code(services, name)
        promises.test_containers_have_no_rights_to_spare(services, name)
    for name in ("rabbitmq", "postgres"):
        promises.test_long_lived_servers_have_a_health_check(services, name)


def test_its_containers_run_its_apps(project: Path, services: dict[str, Any]):
    for name in ("worker", "peer"):
        module = services[name]["command"][-1].partition(":")[0]
        assert (project / f"{module.replace('.', '/')}.py").is_file()


def test_its_image_promises_what_ours_does(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(promises, "ROOT", project)
    stages = promises.read_stages(project / "Dockerfile")

    promises.test_image_leaves_its_build_tools_behind(stages)
    promises.test_image_runs_unprivileged_and_stops_on_sigterm(stages)
    promises.test_image_copies_what_exists_and_is_not_ignored(stages)
