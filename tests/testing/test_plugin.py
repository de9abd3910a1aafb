"""The plugin in projects of their own: with pytest-asyncio in both modes, with anyio, and without either."""

import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import coatcheck.testing

ROOT = Path(__file__).parents[2]

APP = """
    from coatcheck.worker import App, Context

    app = App("greeter")

    @app.task
    async def greet(ctx: Context, name: str) -> str:
        await ctx.sleep(3600)
        return await ctx.call("polish", f"hello {name}", timeout=60)
"""
BODY = """
        coatcheck.peer("polish").replies(str.upper)
        await coatcheck.run(app)
        ticket = await coatcheck.submit("greeter", "ada")
        assert len(coatcheck.tasks) == 1
        await coatcheck.advance(hours=1)
        assert await ticket.result() == "HELLO ADA"
"""
ASYNCIO = ["-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function"]
AUTO = [*ASYNCIO, "-o", "asyncio_mode=auto"]
KINDS = {
    "asyncio-auto": (
        AUTO,
        """
    from app import app
    async def test_one(coatcheck):{body}
    async def test_two(coatcheck):{body}
    """,
    ),
    "asyncio-strict": (
        [*ASYNCIO, "-o", "asyncio_mode=strict", "-o", "asyncio_default_test_loop_scope=session"],
        """
    import pytest
    from app import app
    @pytest.mark.asyncio
    async def test_one(coatcheck):{body}
    @pytest.mark.asyncio
    async def test_two(coatcheck):{body}
    """,
    ),
    "anyio": (
        ["-p", "anyio.pytest_plugin"],
        """
    import pytest
    from app import app
    pytestmark = pytest.mark.anyio
    @pytest.fixture
    def anyio_backend():
        return "asyncio"
    @pytest.fixture
    async def something():
        yield
    async def test_one(coatcheck, something):{body}
    async def test_two(something, coatcheck):{body}
    """,
    ),
    "plain": (
        [],
        """
    import asyncio
    from app import app
    async def play(coatcheck):{body}
    def test_one(coatcheck):
        asyncio.run(play(coatcheck))
    def test_two(coatcheck):
        asyncio.run(play(coatcheck))
    """,
    ),
}


def run_pytest(where: Path, *arguments: str) -> str:
    """Run pytest in a project there, with no plugin but ours and those named, and every warning an error."""
    plugin = ["-p", "coatcheck.testing.plugin"]
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *plugin, *arguments]
    roots = os.pathsep.join(str(ROOT / each) for each in ("worker", "broker", "store"))
    environment = {**os.environ, "PYTHONPATH": roots, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_fixture_in_a_project_of_its_own(tmp_path, kind):
    arguments, test = KINDS[kind]
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    (tmp_path / "test_greeter.py").write_text(textwrap.dedent(test).replace("{body}", BODY))

    assert "2 passed" in run_pytest(tmp_path, *arguments)


def test_failing_test_says_what_the_task_waits_for(tmp_path):
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    test = "from app import app\nasync def test_it(coatcheck):" + BODY.replace("hours=1", "minutes=1")
    (tmp_path / "test_greeter.py").write_text(test)

    said = run_pytest(tmp_path, *AUTO, "--show-capture=no")

    assert "1 failed" in said
    assert "waits for\nE             - the end of its sleep '@sleep': with `await stage.advance(minutes=59)`" in said


def test_plugin_gives_one_fixture_and_imports_nothing_of_the_engine(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import sys
        def test_it():
            ours = {name for name in sys.modules if name.startswith("coatcheck.")}
            assert ours == {"coatcheck.testing", "coatcheck.testing.plugin"}
        """)
    )

    assert "1 passed" in run_pytest(tmp_path)
    fixtures = run_pytest(tmp_path, "--fixtures")
    assert fixtures.count("coatcheck/testing/plugin.py") == 1
    assert "coatcheck -- " in fixtures


def test_entry_point_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["entry-points"]["pytest11"] == {"coatcheck": "coatcheck.testing.plugin"}


def test_every_public_name_is_there():
    for name in coatcheck.testing.__all__:
        assert getattr(coatcheck.testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Theatre'"):
        _ = coatcheck.testing.Theatre
