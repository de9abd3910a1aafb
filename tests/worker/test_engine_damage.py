"""Recorded values that cannot be read: the run is held, and its handler never hears of it."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from msgspec.structs import replace
from tests.worker.fake_port import Desk

from coatcheck.store import CorruptBlob, blobs
from coatcheck.store.rows import CallState
from coatcheck.worker.engine.context import Context
from coatcheck.worker.engine.run_port import Finished, Held
from coatcheck.worker.problems import problem_of


def plan() -> str:
    return "plan"


def stumble() -> str:
    raise RuntimeError("no")


SEEN: list[BaseException] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


async def hardened(ctx: Context) -> Any:
    """Catches whatever a handler may catch, as handlers do, and ends as done."""
    results: list[Any] = []
    for make in (
        lambda: ctx.step(plan),
        lambda: ctx.step(stumble),
        lambda: ctx.call("search", "owls", timeout=60),
        lambda: ctx.call("refuses", "owls", timeout=60),
    ):
        try:
            results.append(await make())
        except Exception as error:  # noqa: BLE001
            SEEN.append(error)
    try:
        results.append(ctx.now())
        results += await ctx.gather(ctx.call("a", 1, timeout=60), ctx.call("b", 2, timeout=60), return_exceptions=True)
        results += await asyncio.gather(branch(ctx, "c"), branch(ctx, "d"))
        results.append(await ctx.first(ctx.call("e", 5, timeout=60), ctx.call("f", 6, timeout=60)))
    except Exception as error:  # noqa: BLE001
        SEEN.append(error)
    await ctx.call("last", timeout=60)
    return [each.isoformat() if isinstance(each, datetime) else each for each in results]


async def branch(ctx: Context, peer: str) -> Any:
    try:
        return await ctx.call(peer, peer, timeout=60)
    except Exception as error:  # noqa: BLE001
        SEEN.append(error)
        return None


async def lived(handler: Any = hardened) -> Desk:
    """A task at its last wait, with something of every kind recorded."""
    desk = Desk(handler)
    for _ in range(12):
        await desk.parked()
        if "last" in desk.rows.open_calls:
            desk.ok("last")
            return desk
        for key in list(desk.rows.open_calls):
            if desk.rows.open_calls[key].peer == "refuses":
                desk.fail(key)
            else:
                desk.ok(key, f"the answer of {key}")
    raise AssertionError("it does not come to its last wait")


def flip(blob: bytes, at: int) -> bytes:
    return blob[:at] + bytes((blob[at] ^ 0x10,)) + blob[at + 1 :]


DAMAGES = {
    "bit of the body": lambda blob: flip(blob, len(blob) - 1),
    "checksum": lambda blob: flip(blob, 6),
    "format version": lambda blob: b"\x09" + blob[1:],
    "codec": lambda blob: blob[:1] + b"\x63" + blob[2:],
    "key": lambda blob: blob[:3] + b"\x05" + blob[4:],
    "cut off": lambda blob: blob[: len(blob) // 2],
    "empty": lambda _: b"\x00",
    "no JSON": lambda _: blobs.pack(blobs.Codec.JSON, b'"cut off'),
    "no text": lambda _: blobs.pack(blobs.Codec.TEXT, b"\xff\xfe"),
    "no CBOR": lambda _: blobs.pack(blobs.Codec.CBOR, b"\x9f"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_value_holds_the_run_and_its_handler_never_sees_it(damage: str) -> None:
    undamaged = await lived()
    SEEN.clear()
    expected = await undamaged.finished()
    failures = [type(error) for error in SEEN]
    keys = [key for key, each in undamaged.rows.recorded.items() if each.state is not CallState.CLOSED]
    assert len(keys) >= 11

    for key in keys:
        if key == "last":
            continue
        desk = await lived()
        whole = desk.rows.recorded[key]
        desk.rows.recorded[key] = replace(whole, value=DAMAGES[damage](whole.value))
        SEEN.clear()

        outcome = await desk.once()

        if isinstance(outcome, Finished):  # the loser of a race, which nobody reads
            assert key in ("e", "f")
            continue
        assert isinstance(outcome, Held), (key, outcome)
        assert isinstance(outcome.error, CorruptBlob)
        assert repr(key) in str(outcome.error)
        assert "restore" in str(outcome.error)
        document = problem_of(outcome.error)
        assert (document["code"], document["retryable"]) == ("damaged_value", False)
        assert not any(isinstance(error, CorruptBlob) for error in SEEN)
        assert desk.rows.recorded[key].value == DAMAGES[damage](whole.value)

        desk.rows.recorded[key] = whole
        SEEN.clear()
        assert len(await desk.finished()) == len(expected)
        assert [type(error) for error in SEEN] == failures


async def test_damaged_value_that_arrives_while_the_run_lives_holds_it() -> None:
    async def handler(ctx: Context) -> str:
        try:
            return str(await ctx.call("search", timeout=60))
        except Exception as error:  # noqa: BLE001
            SEEN.append(error)
            return "wrong"

    desk = Desk(handler, parks=False)
    run = desk.begin()
    running = asyncio.create_task(run.execute())
    while "search" not in desk.rows.open_calls:
        await asyncio.sleep(0)

    news = desk.rows.end_call("search", CallState.OK, flip(blobs.encode("good"), 12))
    run.deliver([news])

    assert isinstance(await asyncio.wait_for(running, 10), Held)
    assert SEEN == []


async def test_recorded_result_that_does_not_fit_its_type_any_more_holds_the_run() -> None:
    def made_by(returns: Any) -> Any:
        async def handler(ctx: Context) -> str:
            try:
                found = await ctx.step(plan, returns=returns)
            except Exception as error:  # noqa: BLE001
                SEEN.append(error)
                found = "wrong"
            await ctx.call("search", timeout=60)
            return str(found)

        return handler

    desk = Desk(made_by(str))
    await desk.parked()
    desk.ok("search")

    desk.handler = made_by(int)
    outcome = await desk.once()

    assert isinstance(outcome, Held)
    assert "'plan'" in str(outcome.error)
    assert SEEN == []
    desk.handler = made_by(str)
    assert await desk.finished() == "plan"
