"""The attacks of a hostile run: each goes on, at a bounded pace, until the run ends.

Every one was a way to stop, fill or fool a replica once, or is next to one that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiormq.abc import DeliveredMessage
from tests.fuzz.messages import fuzzed
from tests.fuzz.servers import properties_of
from tests.hostile.app import TOKEN
from tests.hostile.scene import Scene, Stranger

Attack = Callable[[Scene, Stranger], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}
BODY_LIMIT = 1 << 20
HASH_MODULUS = (1 << 61) - 1
SEED = 7


def attack(name: str) -> Callable[[Attack], Attack]:
    def enter(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return enter


async def run_attack(scene: Scene, name: str) -> None:
    async with Stranger(scene.broker) as stranger:
        await ATTACKS[name](scene, stranger)


# --- bodies and headers ---


@attack("fuzzed messages")
async def send_fuzzed(scene: Scene, stranger: Stranger) -> None:
    """Answers to them are kept in a queue that drops the oldest; no client waits for them."""
    channel = await stranger.channel()
    await channel.queue_declare(scene.knowledge.sink, arguments={"x-max-length": 1000})
    number = 0
    while await scene.pause(0.25):
        for _ in range(20):
            each = fuzzed(SEED, number, scene.knowledge)
            await stranger.send_with(properties_of(each), scene.queues[each.queue], each.message.body)
            number += 1
        scene.counts["fuzzed messages"] += 20


def packed_integer_keys(count: int) -> bytes:
    """A MessagePack map with integer keys that fall into the same places of a hash table."""
    keys = (msgspec.msgpack.encode(number << 32) + b"\xc0" for number in range(count))
    return b"\xdf" + count.to_bytes(4, "big") + b"".join(keys)


SLOW_BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "escaped quotes": ("application/json", lambda: b"[" * 65 + b'"' + b'\\"' * (BODY_LIMIT // 2 - 100)),
    "open quotes": ("application/json", lambda: b'["' * (BODY_LIMIT // 2 - 100)),
    "backslashes": ("application/json", lambda: b'"' + b"\\" * (BODY_LIMIT - 100)),
    "brackets": ("application/json", lambda: b"[" * (BODY_LIMIT - 1)),
    "spaces": ("application/json", lambda: b" " * (BODY_LIMIT - 1)),
    "digits": ("application/json", lambda: b"1" * (BODY_LIMIT - 1)),
    "many numbers": ("application/json", lambda: b"[" + b"1e308," * 100_000 + b"1]"),
    "integer keys": ("application/msgpack", lambda: packed_integer_keys(80_000)),
    "CBOR integer keys": ("application/cbor", lambda: b"\xba\0\1\0\0" + b"\x1b\0\0\0\1\0\0\0\0\xf6" * 65_536),
    "numbers of one hash": ("application/json", lambda: json.dumps([n * HASH_MODULUS for n in range(40_000)]).encode()),
    "tiny arrays": ("application/msgpack", lambda: b"\xdd" + (900_000).to_bytes(4, "big") + b"\x90" * 900_000),
}  # fmt: skip


@attack("bodies that are slow to read")
async def send_slow_bodies(scene: Scene, stranger: Stranger) -> None:
    dice = random.Random(SEED)
    while await scene.pause(0.7):
        kind, make = dice.choice(list(SLOW_BODIES.values()))
        queue = dice.choice(("requests", "replies", "control"))
        call = scene.knowledge.open_call(dice) if scene.knowledge.opened else str(uuid.uuid4())
        handler = dice.choice(("plain", "distinct"))
        await stranger.send(scene.queues[queue], make(), content_type=kind, correlation_id=call, message_type=handler)
        scene.counts["bodies that are slow to read"] += 1


@attack("bodies beyond the limit")
async def send_oversized(scene: Scene, stranger: Stranger) -> None:
    dice = random.Random(SEED)
    while await scene.pause(4):
        queue = dice.choice(("requests", "replies", "control"))
        size = dice.choice((BODY_LIMIT + 1, 8 * BODY_LIMIT, 30 * BODY_LIMIT))
        await stranger.send(scene.queues[queue], bytes(size), content_type="application/json", message_type="plain")
        scene.counts["bodies beyond the limit"] += 1


# --- replies and addresses ---


@attack("answers of a hostile peer")
async def answer_as_hostile_peer(scene: Scene, stranger: Stranger) -> None:
    dice = random.Random(SEED)

    async def on_message(message: DeliveredMessage) -> None:
        asked = message.header.properties
        call, to = asked.correlation_id or "", asked.reply_to or ""
        scene.knowledge.opened.append(call)
        await dice.choice(ANSWERS)(stranger, to, call)
        scene.knowledge.answered.append(call)
        scene.counts["answers of a hostile peer"] += 1

    await stranger.consume(f"{scene.service}-evil", on_message, durable=True)
    await scene.ends.wait()


async def _say_nothing(stranger: Stranger, to: str, call: str) -> None:
    """Let the caller wait until its timeout."""


async def _fail_at_length(stranger: Stranger, to: str, call: str) -> None:
    words = "amqp://user:" + "@" * 400_000 + " password=" + '\\"' * 100_000 + "\x1b[2J\u202e"
    body = json.dumps({"title": "no", "detail": words, "code": "x" * 5000}).encode()
    await stranger.send(to, body[:BODY_LIMIT], correlation_id=call, content_type="application/problem+json")


async def _answer_often(stranger: Stranger, to: str, call: str) -> None:
    for number in range(50):
        await stranger.send(to, b"%d" % number, correlation_id=call, content_type="application/json")


async def _report_progress_without_end(stranger: Stranger, to: str, call: str) -> None:
    for number in range(200):
        body = json.dumps({"done": number, "total": -1, "message": "p" * 4000}).encode()
        await stranger.send(to, body, correlation_id=call, headers={"cc-kind": "progress"})


async def _answer_slow_to_read(stranger: Stranger, to: str, call: str) -> None:
    kind, make = random.choice(list(SLOW_BODIES.values()))
    await stranger.send(to, make(), correlation_id=call, content_type=kind)


async def _answer_too_much(stranger: Stranger, to: str, call: str) -> None:
    await stranger.send(to, bytes(3 * BODY_LIMIT), correlation_id=call)


async def _answer_others(stranger: Stranger, to: str, call: str) -> None:
    for _ in range(30):
        await stranger.send(to, b"1", correlation_id=str(uuid.uuid4()))


ANSWERS = (
    _say_nothing, _fail_at_length, _answer_often, _report_progress_without_end, _answer_slow_to_read, _answer_too_much,
    _answer_others,
)  # fmt: skip


@attack("direct reply addresses that lead nowhere")
async def forge_direct_replies(scene: Scene, stranger: Stranger) -> None:
    while await scene.pause(10):
        for number in range(200):
            address = f"amq.rabbitmq.reply-to.g1h2AA5yZXBseUA{uuid.uuid4().hex}.{number}=="
            await stranger.send(scene.service, b"1", reply_to=address, correlation_id="x", message_type="plain")
        scene.counts["direct reply addresses that lead nowhere"] += 200


@attack("copies of one request with other addresses")
async def copy_requests(scene: Scene, stranger: Stranger) -> None:
    while await scene.pause(15):
        identity = f"copied-{uuid.uuid4()}"
        for number in range(300):
            await stranger.send(
                scene.service, b"1", reply_to=f"{scene.service}-nowhere-{number}", correlation_id=str(number),
                message_type="bulky", content_type="application/json", headers={"cc-id": identity},
            )  # fmt: skip
        scene.counts["copies of one request with other addresses"] += 300


@attack("requests for handlers that do not exist")
async def ask_for_nothing(scene: Scene, stranger: Stranger) -> None:
    while await scene.pause(5):
        for number in range(10):
            handler = f"nosuch{number}"
            await stranger.send(scene.service, b"1", message_type=handler, correlation_id=str(uuid.uuid4()))
        scene.counts["requests for handlers that do not exist"] += 10


@attack("cancels of made-up tasks")
async def cancel_made_up(scene: Scene, stranger: Stranger) -> None:
    while await scene.pause(1):
        for _ in range(10):
            headers = {"cc-kind": "cancel", "cc-id": str(uuid.uuid4())}
            await stranger.send(scene.queues["control"], b"{}", headers=headers, correlation_id=str(uuid.uuid4()))
        scene.counts["cancels of made-up tasks"] += 10


@attack("repeats without the token")
async def repeat_without_token(scene: Scene, stranger: Stranger) -> None:
    """Ask with the token, then again and again without it. No repeat may be answered with the result."""
    queue = f"{scene.service}-thief"

    async def on_message(message: DeliveredMessage) -> None:
        is_refused = "unauthorized" in message.body.decode(errors="replace")
        scene.counts["repeats without the token: " + ("refused" if is_refused else "ANSWERED")] += 1

    await stranger.consume(queue, on_message, durable=True)
    while await scene.pause(3):
        identity = str(uuid.uuid4())
        usual: dict[str, Any] = {"message_type": "secret", "content_type": "application/json"}
        granted = {"cc-id": identity, "authorization": f"Bearer {TOKEN}"}
        await stranger.send(f"{scene.service}-guarded", b"1", headers=granted, **usual)
        for _ in range(5):
            await stranger.send(
                f"{scene.service}-guarded", b"1", headers={"cc-id": identity}, reply_to=queue,
                correlation_id=identity, **usual,
            )  # fmt: skip
            await asyncio.sleep(0.02)


# --- beside the queues ---


@attack("frames of a malicious broker")
async def break_amqp(scene: Scene, _: Stranger) -> None:
    """Put frames that break the protocol between RabbitMQ and one replica, which loses its connection each time."""
    dice, evil = random.Random(SEED), scene.evil
    while await scene.pause(8):
        if not evil.is_armed:
            evil.arm(dice.choice(sorted(evil.attacks)))
            evil.cut()
        scene.counts["frames of a malicious broker"] = sum(evil.played.values())


@attack("idle connections to the health port")
async def hold_health_connections(scene: Scene, _: Stranger) -> None:
    while await scene.pause(5):
        async with contextlib.AsyncExitStack() as stack:
            for port in scene.health_ports:
                for _number in range(40):
                    with contextlib.suppress(OSError):
                        _reader, writer = await asyncio.open_connection("127.0.0.1", port)
                        stack.callback(writer.close)
                        scene.counts["idle connections to the health port"] += 1
            await scene.pause(5)
