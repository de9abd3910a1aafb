"""One replica is killed, the other ends the task: on the embedded server, and by the same code on two real ones."""

import re

import pytest
from tests.examples.processes import Ended, command_of

COMMAND = command_of("Kill a replica")


def test_the_other_replica_ends_the_task_without_any_server(embedded):
    check_story(embedded.play(COMMAND))


def test_the_other_replica_ends_the_task_on_rabbitmq_and_postgres(processes_with_store, prefix):
    check_story(processes_with_store.play(COMMAND, EXAMPLES_PREFIX=prefix("article", "library")))


def check_story(ended: Ended) -> None:
    assert ended.code == 0, ended.printed
    killed = find(r"kill -9 (\d+): gone", ended)
    holders = re.findall(r"replica (\d+) holds the task", ended.printed)
    assert holders[0] == killed
    assert holders[-1] == find(r"replica (\d+) ended the task", ended) != killed
    assert int(find(r"picked up (\d+) times", ended)) >= 3  # as a request, with the reply, after the kill
    assert find(r"written once, by replica (\d+)", ended) in (killed, holders[-1])


def find(pattern: str, ended: Ended) -> str:
    found = re.search(pattern, ended.printed)
    if found is None:
        pytest.fail(f"no {pattern!r} in:\n{ended.printed}")
    return found[1]
