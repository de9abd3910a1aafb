"""The front: a ticket for each report, its progress as server-sent events, its result, and a page that shows them.

POST /reports              {"topic": "…"}; 202 and the ticket
GET  /reports/ID/events    how far it is, until it is done
GET  /reports/ID           200 and the result; 202 while there is none
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coatcheck.worker import Client, TaskFailed

PAGE = Path(__file__).with_name("page.html")
LOOK_EVERY_S = 0.2


@asynccontextmanager
async def connected(front: Starlette) -> AsyncIterator[None]:
    async with Client() as client:
        front.state.client = client
        yield


async def start(request: Request) -> Response:
    match await read_json(request):
        case {"topic": str(topic)}:
            pass
        case _:
            return JSONResponse({"error": 'send {"topic": "…"}'}, status_code=400)
    ticket = await request.app.state.client.submit("reports", topic)
    where = f"/reports/{ticket.task_id}"
    links = {"id": str(ticket.task_id), "result": where, "events": f"{where}/events"}
    return JSONResponse(links, status_code=202, headers={"location": where})


async def read_json(request: Request) -> object:
    try:
        return await request.json()
    except ValueError:
        return None


async def result(request: Request) -> Response:
    """Look up a report. An unknown id and a task that has not begun look the same: no row, and no result yet."""
    client: Client = request.app.state.client
    task = await client.find(request.path_params["task_id"])
    if task is None or not task.state.is_final:
        return JSONResponse({"state": "waiting" if task is None else task.state}, status_code=202)
    try:
        return JSONResponse(await client.result(task.task_id))
    except TaskFailed as error:
        status = error.problem.get("status", 500)
        return JSONResponse(dict(error.problem), status_code=status, media_type="application/problem+json")


async def events(request: Request) -> Response:
    """When the browser leaves, only the stream is cancelled: the front does not hold the task."""
    stream = follow(request.app.state.client, request.path_params["task_id"])
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def follow(client: Client, task_id: UUID) -> AsyncIterator[str]:
    """Read the row again and again and send what is new. A browser that comes back begins with the current state."""
    told: object = None
    while True:
        task = await client.find(task_id)
        if task is not None and task.progress != told:
            told = task.progress
            yield f"event: progress\ndata: {json.dumps(dict(task.progress or {}))}\n\n"
        if task is not None and task.state.is_final:
            yield f"event: end\ndata: {task.state}\n\n"
            return
        await asyncio.sleep(LOOK_EVERY_S)


async def page(_: Request) -> Response:
    return FileResponse(PAGE)


front = Starlette(
    lifespan=connected,
    routes=[
        Route("/", page),
        Route("/reports", start, methods=["POST"]),
        Route("/reports/{task_id:uuid}", result),
        Route("/reports/{task_id:uuid}/events", events),
    ],
)
