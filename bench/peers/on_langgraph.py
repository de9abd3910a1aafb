"""The fan-4 lifecycle in LangGraph with its Postgres saver: four nodes side by side, then one that counts.

PEERS_VARIANT says what the nodes do: `nodes`, the echo itself, in the process; or `interrupt`, where each node stops
at an interrupt, the graph is left in the database, and a second call brings the four answers: the durable wait.

What was chosen, and why:
- `durability="sync"`: a step is in the database before the next one begins, the only mode that loses nothing.
- LangGraph is a library, so client and worker are one process; two of them, one for each core.
- A saver holds one lock around all it does, with a connection and with a pool alike; one saver for all lost more than
  half the throughput in trials. So lifecycles share SAVERS savers with a connection each, made as the saver's
  documentation asks (autocommit, rows as dicts).
"""

import asyncio
import itertools
import operator
import os
import sys
import uuid
from typing import Annotated, TypedDict

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt
from load import FAN, PAYLOAD, ready, serve
from psycopg import AsyncConnection
from psycopg.rows import dict_row

DATABASE = os.environ["PEERS_DATABASE"]
VARIANT = os.environ["PEERS_VARIANT"]
SAVERS = 16


class State(TypedDict, total=False):
    value: dict[str, str]
    echoes: Annotated[list[dict[str, str]], operator.add]
    whole_count: int


async def echo(state: State) -> State:
    return {"echoes": [state["value"]]}


async def ask(state: State) -> State:
    return {"echoes": [interrupt(state["value"])]}


async def finish(state: State) -> State:
    return {"whole_count": sum(each == state["value"] for each in state["echoes"])}


async def saver() -> AsyncPostgresSaver:
    connection = await AsyncConnection.connect(DATABASE, autocommit=True, prepare_threshold=0, row_factory=dict_row)
    return AsyncPostgresSaver(connection)


def compiled(checkpointer: AsyncPostgresSaver) -> CompiledStateGraph:
    graph = StateGraph(State)
    names = [f"echo_{number}" for number in range(FAN)]
    for name in names:
        graph.add_node(name, echo if VARIANT == "nodes" else ask)
        graph.add_edge(START, name)
    graph.add_node("finish", finish)
    graph.add_edge(names, "finish")
    graph.add_edge("finish", END)
    return graph.compile(checkpointer=checkpointer)


async def migrate() -> None:
    await (await saver()).setup()
    ready()


async def client() -> None:
    graphs = itertools.cycle([compiled(await saver()) for _ in range(SAVERS)])

    async def call() -> object:
        graph, config = next(graphs), {"configurable": {"thread_id": uuid.uuid4().hex}}
        state = await graph.ainvoke({"value": PAYLOAD, "echoes": []}, config, durability="sync")
        if VARIANT == "interrupt":
            answers = {each.id: each.value for each in state["__interrupt__"]}
            state = await graph.ainvoke(Command(resume=answers), config, durability="sync")
        return state["whole_count"]

    await serve(call)


asyncio.run({"migrate": migrate, "client": client}[sys.argv[1]]())
