"""A RabbitMQ of a test's own, to be killed, restarted and put under alarm. Never the shared one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import aiormq
import pytest

_BIN = Path("/usr/lib/rabbitmq/bin")  # behind Debian's wrapper, which switches users and directories
_START_S = 60.0


def _script(name: str) -> str | None:
    return str(_BIN / name) if (_BIN / name).exists() else shutil.which(name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """One broker with temporary data that survives `kill` and `start`, and goes with `close`."""

    def __init__(self, config: str = "", *, advanced: str = "[].") -> None:
        if _script("rabbitmq-server") is None:
            pytest.skip("no rabbitmq-server on this machine to start one of our own")
        self.port = _free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self._home = Path(tempfile.mkdtemp(prefix="coatcheck-node-"))
        self.data = self._home / "data"
        self._process: subprocess.Popen[bytes] | None = None
        files = {
            "rabbitmq.conf": f"listeners.tcp.local = 127.0.0.1:{self.port}\n{config}\n",
            "advanced.config": f"{advanced}\n",
            "rabbitmq-env.conf": "",
            "enabled_plugins": "[].\n",
        }
        for name, text in files.items():
            (self._home / name).write_text(text)
        self._environment = {
            **os.environ,
            "HOME": str(self._home),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_CONF_ENV_FILE": str(self._home / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self._home / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self._home / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._home / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(self._home / "log"),
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_NODENAME": f"cctest-{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(_free_port()),
        }

    async def start(self) -> None:
        script = _script("rabbitmq-server")
        assert script is not None
        with (self._home / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                [script],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        async with asyncio.timeout(_START_S):
            while not await self._answers():
                assert self._process.poll() is None, (self._home / "server.log").read_text()[-2000:]
                await asyncio.sleep(0.2)

    async def kill(self) -> None:
        """Kill it as a power cut would."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
            self._process = None

    async def control(self, *words: str) -> str:
        script = _script("rabbitmqctl")
        assert script is not None
        process = await asyncio.create_subprocess_exec(
            script, *words, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()

    async def close(self) -> None:
        await self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    async def _answers(self) -> bool:
        try:
            connection = await aiormq.connect(self.url)
        except OSError:
            return False
        await connection.close()
        return True
