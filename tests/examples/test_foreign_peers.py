"""Peers in three languages, none with our library; and what the command says where something is missing."""

import os
import re
import shutil
from pathlib import Path

import pytest
from tests.examples.processes import ROOT, Processes, command_of

EXAMPLE = ROOT / "examples/foreign_peers"
COMMAND = command_of("Foreign peers: bash, Node, pika")
QUEUES = ("longest", "letters", "words", "words.in", "words.out")


def test_handler_joins_what_all_three_say(processes_with_store, prefix):
    for program, package in (("node", "Node.js"), ("npm", "Node.js"), ("amqp-consume", "amqp-tools")):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on PATH; install {package}")

    ended = processes_with_store.play(COMMAND, EXAMPLES_PREFIX=prefix("text", queues=QUEUES))

    if "`npm ci` in examples/ failed" in ended.printed and os.environ.get("CI") != "true":
        pytest.skip("`npm ci` failed, the npm registry may be out of reach")
    assert ended.code == 0, ended.printed
    assert ended.lines[-3:] == [
        "words (bash): 5",
        "longest (Node): octopus",
        "letters (pika): {'t': 4, 'h': 4, 'e': 4, 's': 3, 'o': 2}",
    ]


def test_command_says_all_that_is_missing(tmp_path: Path):
    nobody = "amqp://guest:secret@127.0.0.1:1/"
    processes = Processes(tmp_path, {"PATH": str(tmp_path), "COATCHECK_BROKER": nobody})

    ended = processes.play(COMMAND)

    assert ended.code == 1
    assert ended.lines[0] == "This example needs what is not here:"
    for program in ("node", "npm", "bash", "amqp-consume"):
        assert f"\n  {program}: " in ended.printed
    assert "RabbitMQ: none answers at 127.0.0.1:1/" in ended.printed
    assert "export COATCHECK_BROKER=amqp://" in ended.printed
    assert "secret" not in ended.printed
    assert "Traceback" not in ended.printed


def test_command_says_that_another_broker_will_not_do(tmp_path: Path):
    ended = Processes(tmp_path, {"COATCHECK_BROKER": "pg://somewhere/else"}).play(COMMAND)

    assert ended.code == 1
    assert "COATCHECK_BROKER names another kind of broker" in ended.printed


def test_peers_use_nothing_of_ours():
    peers = [EXAMPLE / name for name in ("peer.js", "peer.py", "peer.sh", "desk.py")]
    imports = {
        path.name: re.findall(r"^\s*(?:from|import)\b.*", path.read_text(), flags=re.MULTILINE) for path in peers
    }

    assert not any("coatcheck" in line or "examples" in line for lines in imports.values() for line in lines)
    assert all(imports[name] for name in ("peer.js", "peer.py", "desk.py"))
