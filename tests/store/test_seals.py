"""Seals: the tree, the signature, what each covers, and who makes it when two want to."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import pytest
from msgspec.structs import replace
from tests.store.bench import Bench
from tests.store.histories import NOON, chain_of, insert, settle, write
from tests.store.kit import new_id

from coatcheck.errors import InvalidSettings, UsageError
from coatcheck.store import Store
from coatcheck.store.seals import (
    Leaf,
    PublicKey,
    Seal,
    SealKey,
    Unsealed,
    document_of,
    hash_header,
    hash_leaf,
    hash_node,
    make_seal,
    prove,
    root_by,
    root_of,
    seal_of,
)

KEY = SealKey(bytes(range(32)))


def leaves_of(count: int) -> list[Leaf]:
    return [Leaf(new_id(), number, hashlib.sha256(str(number).encode()).digest()) for number in range(1, count + 1)]


async def seal(store: Store, **options) -> Seal | None:
    unsealed = await store.read_unsealed(**options)
    if not unsealed.leaves:
        return None
    made = make_seal(unsealed, KEY)
    return made if await store.add_seal(made, unsealed.leaves) else None


# --- the tree ---


def rfc_root(hashes: Sequence[bytes]) -> bytes:
    """RFC 6962, 2.1, word by word."""
    if len(hashes) == 1:
        return hashes[0]
    split = 1
    while 2 * split < len(hashes):
        split *= 2
    return hash_node(rfc_root(hashes[:split]), rfc_root(hashes[split:]))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13, 64, 100])
def test_root_is_that_of_rfc_6962_and_every_leaf_is_proven_by_it(count: int):
    leaves = leaves_of(count)

    root = root_of(leaves)

    assert root == rfc_root([hash_leaf(leaf) for leaf in leaves])
    assert [root_by(prove(leaves, place), leaf) for place, leaf in enumerate(leaves)] == [root] * count


def test_proof_fits_no_other_leaf_place_or_size():
    leaves = leaves_of(13)
    proof, root = prove(leaves, 5), root_of(leaves)

    assert root_by(proof, leaves[6]) != root
    assert root_by(replace(proof, place=4), leaves[5]) != root
    assert root_by(replace(proof, place=13), leaves[5]) is None
    assert root_by(replace(proof, size=200), leaves[5]) is None
    assert root_by(replace(proof, path=proof.path[:-1]), leaves[5]) is None
    assert root_by(replace(proof, path=(*proof.path, bytes(32))), leaves[5]) is None


def test_leaf_and_node_never_hash_alike():
    """A node that could be shown as a leaf would be proven by the same root."""
    left, right = leaves_of(2)

    assert (
        hash_node(hash_leaf(left), hash_leaf(right))
        != hashlib.sha256(b"\x00" + hash_leaf(left) + hash_leaf(right)).digest()
    )


def test_root_of_nothing_is_the_hash_of_nothing():
    assert root_of([]) == hashlib.sha256().digest()


# --- the signature ---


def made_seal() -> Seal:
    return make_seal(Unsealed(None, NOON, 700, 9, tuple(leaves_of(3))), KEY)


def test_signature_is_of_every_field_of_the_header():
    seal = made_seal()
    others = {
        "number": 2,
        "sealed_at": NOON + timedelta(microseconds=1),
        "horizon": 701,
        "task_count": 4,
        "entry_count": 8,
        "root": bytes(32),
        "previous": b"\x01" * 32,
        "trimmed_to": 1,
        "key_id": "another",
    }

    assert KEY.public.has_signed(seal)
    assert others.keys() == set(Seal.__struct_fields__) - {"signature", "token"}
    for name, value in others.items():
        assert not KEY.public.has_signed(replace(seal, **{name: value})), name
    assert not SealKey.generate().public.has_signed(seal)


def test_seal_names_the_header_before_it():
    first = made_seal()

    second = make_seal(Unsealed(first, NOON, 800, 1, tuple(leaves_of(1))), KEY)

    assert (second.number, second.previous) == (2, hash_header(first))


def test_seal_is_the_same_after_it_was_a_document():
    seal = made_seal()

    assert seal_of(document_of(seal)) == seal
    with pytest.raises(ValueError, match="it is no seal"):
        seal_of({"number": 1})


def test_public_key_is_read_as_it_is_printed_and_a_wrong_one_is_explained():
    assert PublicKey.parse(f" {KEY.public}\n").key_id == KEY.key_id

    with pytest.raises(InvalidSettings, match="'abc' is no public key"):
        PublicKey.parse("abc")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)

    with pytest.raises(UsageError, match=r"pip install 'coatcheck\[audit\]'"):
        SealKey.generate()


# --- what a seal covers, on both kinds of rows ---


async def test_seal_covers_the_newest_entry_of_each_task_that_changed(bench: Bench, store: Store):
    one, two = sorted((new_id(), new_id()))
    first, second = chain_of(one, 3), chain_of(two, 1)
    await write(bench, one, first)
    await write(bench, two, second)

    made = await seal(store)

    assert made is not None
    assert (made.number, made.task_count, made.entry_count, made.trimmed_to) == (1, 2, 4, 0)
    leaves = [leaf for _, leaf in await store.read_leaves(after=0, last=1, limit=10)]
    assert leaves == [Leaf(one, 3, first[-1].hash), Leaf(two, 1, second[-1].hash)]
    assert made.root == root_of(leaves)
    assert await store.read_seals() == [made]


async def test_next_seal_covers_only_what_came_since(bench: Bench, store: Store):
    one, two = new_id(), new_id()
    chain = chain_of(one, 1)
    await write(bench, one, chain)
    await write(bench, two, chain_of(two, 1))
    first = await seal(store)

    assert await seal(store) is None

    more = chain_of(one, 2, after=chain)
    await write(bench, one, more)
    second = await seal(store)

    assert first is not None
    assert second is not None
    assert (second.number, second.task_count, second.entry_count) == (2, 1, 2)
    assert second.previous == hash_header(first)
    assert await store.read_leaves(after=1, last=2, limit=10) == [(2, Leaf(one, 3, more[-1].hash))]


async def test_of_two_sweepers_that_seal_at_once_one_does_it(bench: Bench, store: Store, other: Store):
    task_id = new_id()
    await write(bench, task_id, chain_of(task_id, 2))
    drafts = [await store.read_unsealed(), await other.read_unsealed()]
    seals = [make_seal(draft, KEY) for draft in drafts]

    added = await asyncio.gather(
        *(each.add_seal(seal, draft.leaves) for each, seal, draft in zip((store, other), seals, drafts, strict=True))
    )

    assert sorted(added) == [False, True]
    assert len(await store.read_seals()) == 1
    assert len(await store.read_leaves(after=0, last=9, limit=10)) == 1


async def test_what_is_older_than_it_is_kept_may_go_once_a_seal_says_so(bench: Bench, store: Store):
    task_id = new_id()
    chain = chain_of(task_id, 1)
    await write(bench, task_id, chain)
    await seal(store)
    await write(bench, task_id, chain_of(task_id, 1, after=chain))

    assert (await store.read_unsealed(keep=timedelta(hours=1))).trimmed_to == 0
    assert (await store.read_unsealed(keep=timedelta())).trimmed_to == 1


async def test_sink_marks_never_go_back(store: Store):
    await store.mark_sink("log:", 7)
    await store.mark_sink("log:", 3)
    await store.mark_sink("file:/x", 1)

    assert [(mark.sink, mark.number) for mark in await store.read_sinks()] == [("file:/x", 1), ("log:", 7)]


async def test_lag_is_that_of_the_oldest_entry_that_no_seal_has(bench: Bench, store: Store):
    assert (await store.find_seal_lag()).lag == timedelta()
    task_id = new_id()
    await write(bench, task_id, chain_of(task_id, 2))

    before = await store.find_seal_lag()
    made = await seal(store)
    after = await store.find_seal_lag()

    assert before.newest is None
    assert before.lag == before.now - (NOON + timedelta(seconds=1))
    assert (after.newest, after.lag) == (made, timedelta())


# --- transactions ---


async def test_entries_of_a_transaction_that_is_open_wait_for_a_later_seal(
    store: Store, sql: asyncpg.Connection, store_url: str
):
    early, late = new_id(), new_id()
    slow = await asyncpg.connect(store_url)
    transaction = slow.transaction()
    await transaction.start()
    await insert(slow, early, chain_of(early, 1))
    await insert(sql, late, chain_of(late, 1))

    assert await seal(store) is None  # `late` is committed, and has a higher number than one that is open

    await transaction.commit()
    await slow.close()
    await settle(sql)
    made = await seal(store)

    assert made is not None
    assert {leaf.task_id for _, leaf in await store.read_leaves(after=0, last=1, limit=10)} == {early, late}


async def test_many_entries_are_sealed_in_pieces_and_none_is_left_out(store: Store, sql: asyncpg.Connection):
    tasks = [new_id() for _ in range(10)]
    for task_id in tasks:
        for entry in chain_of(task_id, 2):
            await insert(sql, task_id, [entry])
    await settle(sql)

    seals = []
    while (made := await seal(store, limit=6)) is not None:
        seals.append(made)

    assert [made.entry_count for made in seals] == [6, 6, 6, 2]
    leaves = await store.read_leaves(after=0, last=99, limit=99)
    assert {leaf.task_id for _, leaf in leaves if leaf.entry_count == 2} == set(tasks)


async def test_transaction_larger_than_a_piece_is_sealed_whole(store: Store, sql: asyncpg.Connection):
    task_id = new_id()
    async with sql.transaction():
        await insert(sql, task_id, chain_of(task_id, 9))
    await settle(sql)

    made = await seal(store, limit=2)

    assert made is not None
    assert made.entry_count == 9


async def test_rows_that_came_from_a_server_with_higher_transactions_are_sealed(store: Store, sql: asyncpg.Connection):
    """After a restore into a new cluster, whose transactions begin anew."""
    before, after = new_id(), new_id()
    await insert(sql, before, chain_of(before, 1))
    await sql.execute("UPDATE coatcheck.history SET xid = '9000000000000'")
    unsealed = await store.read_unsealed()
    old = make_seal(replace(unsealed, horizon=9_000_000_000_001, leaves=tuple(leaves_of(1))), KEY)
    await store.add_seal(old, ())
    await insert(sql, after, chain_of(after, 1))

    made = await seal(store)

    assert made is not None
    assert {leaf.task_id for _, leaf in await store.read_leaves(after=1, last=2, limit=9)} == {before, after}
    assert made.horizon < old.horizon
    assert await seal(store) is None
