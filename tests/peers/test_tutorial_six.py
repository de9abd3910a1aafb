"""RabbitMQ's own RPC tutorial, unchanged, on either side of us: no content type, no message id, transient replies."""

import asyncio
import re

from tests.peers.programs import TUTORIAL

from coatcheck.store.rows import TaskState
from coatcheck.worker import App, CallFailed, Context


def app_that_asks(service: str, peer: str) -> App:
    """A service whose one handler leaves the work to the tutorial's server."""
    app = App(service)

    @app.task
    async def fib(ctx: Context, n: int) -> int:
        return await ctx.call(peer, n, timeout=60, returns=int)

    return app


# --- their server is our peer ---


async def test_task_parks_on_the_tutorials_server_and_resumes_on_its_reply(
    tutorial, service_name, replica, client, eventually
):
    async with tutorial.server() as server, replica(app_that_asks(service_name, tutorial.queue)):
        server.pause()
        ticket = await client.submit(service_name, 20)
        await eventually(lambda: is_parked(client, ticket.task_id))
        server.go_on()

        assert await ticket.result(30) == 6765

    assert (await client.get(ticket.task_id)).state is TaskState.DONE


async def test_another_replica_resumes_what_the_first_one_put_down(tutorial, service_name, replica, client, eventually):
    async with tutorial.server() as server:
        server.pause()
        async with replica(app_that_asks(service_name, tutorial.queue)):
            ticket = await client.submit(service_name, 20)
            await eventually(lambda: is_parked(client, ticket.task_id))
        async with replica(app_that_asks(service_name, tutorial.queue)):
            server.go_on()

            assert await ticket.result(30) == 6765


async def test_tutorials_server_answers_many_calls_of_one_task(tutorial, service_name, replica, client):
    app = App(service_name)

    @app.task
    async def first_numbers(ctx: Context, count: int) -> list[int]:
        return await ctx.gather(*(ctx.call(tutorial.queue, n, timeout=60, returns=int) for n in range(count)))

    async with tutorial.server(), replica(app):
        assert await client.call(service_name, 12, timeout=30) == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89]


async def test_tutorials_server_that_is_not_there_is_an_error_at_once(service_names, replica, client):
    service_name, nobody = service_names.new(), service_names.new("rpc")
    app = App(service_name)

    @app.task
    async def fib(ctx: Context, n: int) -> str:
        try:
            return await ctx.call(nobody, n, timeout=60)
        except CallFailed as error:
            return error.code

    async with replica(app):
        assert await client.call(service_name, 20, timeout=30) == "no_route"


# --- their client asks us ---


async def test_tutorials_client_is_answered_by_a_handler_that_never_waits(tutorial, service_name, replica, client):
    app = App(service_name)

    @app.task
    async def fib(ctx: Context, n: int) -> int:
        a, b = 0, 1
        for _ in range(n):
            a, b = b, a + b
        return a

    async with replica(app):
        printed = await tutorial.ask(30, service_name)

    assert "Got 832040" in printed
    assert await client.list(service=service_name) == []


async def test_tutorials_client_is_answered_by_a_handler_that_waits_on_a_peer(tutorial, service_name, replica, client):
    async with (
        tutorial.server(),
        replica(app_that_asks(service_name, tutorial.queue)),
    ):
        printed = await tutorial.ask(20, service_name)

    assert "Got 6765" in printed
    (task,) = await client.list(service=service_name)
    assert task.state is TaskState.DONE


async def test_tutorials_client_gets_its_answer_from_a_replica_that_came_later(
    tutorial, service_name, replica, client, eventually
):
    async with tutorial.server() as server:
        server.pause()
        async with replica(app_that_asks(service_name, tutorial.queue)):
            asking = asyncio.create_task(tutorial.ask(20, service_name))
            await eventually(lambda: client.list(service=service_name, states=[TaskState.PARKED]))
        async with replica(app_that_asks(service_name, tutorial.queue)):
            server.go_on()

            assert "Got 6765" in await asking


async def test_two_questions_of_one_client_with_the_same_body_are_two_tasks(service_name, broker_url, replica, client):
    from examples.tutorial_six.rpc_client import FibonacciRpcClient

    def ask_twice() -> list[int]:
        asker = FibonacciRpcClient(service_name, broker_url)
        answers = [asker.call(10), asker.call(10)]
        asker.connection.close()
        return answers

    def compute(n: int) -> int:
        return 55

    app = App(service_name)

    @app.task
    async def fib(ctx: Context, n: int) -> int:
        return await ctx.step(compute, n)

    async with replica(app):
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(ask_twice) == [55, 55]

    assert len(await client.list(service=service_name)) == 2


# --- the programs themselves ---


async def test_tutorials_client_and_server_understand_each_other(tutorial):
    async with tutorial.server():
        assert "Got 55" in await tutorial.ask(10, tutorial.queue)


def test_programs_use_nothing_of_ours():
    for program in (*TUTORIAL.glob("*.py"), *TUTORIAL.glob("*.js")):
        imports = re.findall(r"^\s*(?:from|import)\b.*", program.read_text(), flags=re.MULTILINE)
        assert imports
        assert not any("coatcheck" in line for line in imports)


def test_lock_of_the_node_programs_names_no_registry():
    text = (TUTORIAL.parent / "package-lock.json").read_text()

    assert '"integrity": "sha512-' in text
    assert "resolved" not in text
    assert "://" not in text


def test_clients_declare_nothing_but_their_own_callback_queue():
    """A declare with the tutorial's arguments would be refused: a service's queue is durable and replicated."""
    source = (TUTORIAL / "rpc_client.py").read_text() + (TUTORIAL / "rpc_client.js").read_text()

    declares = re.findall(r"(?:queue_declare|assertQueue)\(([^)]*)\)", source)

    assert declares == ['queue="", exclusive=True', "'', { exclusive: true }"]


async def is_parked(client, task_id) -> bool:
    task = await client.find(task_id)
    return task is not None and task.state is TaskState.PARKED
