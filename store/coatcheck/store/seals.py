"""Seals: what the histories of tasks stood at, as one root, signed with a key that the database does not have.

    leaf   = SHA-256( 0, task, how many entries, hash of the last )          one for each task that had changed
    node   = SHA-256( 1, left, right )                                       the tree of RFC 6962
    header = number, time, horizon, counts, root, hash of the header before, trimmed_to, key

The header is signed with Ed25519. Every field is preceded by its length, as in `chain.py`. Nothing here does I/O;
`cryptography` is loaded only to sign and to verify.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from coatcheck.errors import InvalidSettings, UsageError
from coatcheck.store.chain import encode_fields, to_microseconds
from coatcheck.store.rows import Value

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = b"coatcheck.seal.1"
NO_SEAL = bytes(32)
"""What stands for the header before the first seal."""
KEY_BYTES = 32


class Leaf(Value, frozen=True):
    """Where a task's history stood: so many entries, and the hash of the last."""

    task_id: UUID
    entry_count: int
    head: bytes


class Seal(Value, frozen=True):
    """A root over the leaves of what had changed since the seal before, signed."""

    number: int
    sealed_at: datetime
    horizon: int
    """History of transactions below it is covered, by this seal or an earlier one."""
    task_count: int
    entry_count: int
    root: bytes
    previous: bytes
    trimmed_to: int
    """History that seals up to this number cover may be gone: retention is done with it."""
    key_id: str
    signature: bytes = b""
    token: bytes | None = None


class Unsealed(Value, frozen=True):
    """What the next seal is to cover. `oldest_at` is of the first entry that no seal covers, in or out of `leaves`."""

    last: Seal | None
    now: datetime
    horizon: int
    entry_count: int
    leaves: tuple[Leaf, ...]
    trimmed_to: int = 0
    oldest_at: datetime | None = None


class Proof(Value, frozen=True):
    """Shows that a leaf is in a tree of `size` leaves: the nodes beside the way from its place to the root."""

    place: int
    size: int
    path: tuple[bytes, ...]


class SinkMark(Value, frozen=True):
    """Up to which seal a place outside the database has them."""

    sink: str
    number: int
    written_at: datetime


# --- the tree ---


def hash_leaf(leaf: Leaf) -> bytes:
    fields = (leaf.task_id.bytes, _text(leaf.entry_count), leaf.head)
    return hashlib.sha256(b"\x00" + encode_fields(fields)).digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_of(leaves: Iterable[Leaf]) -> bytes:
    """The root over these leaves, in their order. Of none it is the hash of nothing, as in RFC 6962."""
    level = [hash_leaf(leaf) for leaf in leaves]
    while len(level) > 1:
        level = _level_above(level)
    return level[0] if level else hashlib.sha256().digest()


def prove(leaves: Sequence[Leaf], place: int) -> Proof:
    """The proof that the leaf at this place is in the tree."""
    level, index, path = [hash_leaf(leaf) for leaf in leaves], place, list[bytes]()
    while len(level) > 1:
        if (beside := index ^ 1) < len(level):
            path.append(level[beside])
        level, index = _level_above(level), index // 2
    return Proof(place, len(leaves), tuple(path))


def root_by(proof: Proof, leaf: Leaf) -> bytes | None:
    """The root that a proof leads to; None: its path does not fit its place."""
    found, index, size, path = hash_leaf(leaf), proof.place, proof.size, list(proof.path)
    if not 0 <= index < size:
        return None
    while size > 1:
        if index ^ 1 < size:
            if not path:
                return None
            beside = path.pop(0)
            found = hash_node(beside, found) if index % 2 else hash_node(found, beside)
        index, size = index // 2, (size + 1) // 2
    return None if path else found


def _level_above(level: Sequence[bytes]) -> list[bytes]:
    """Pairs become nodes; a last one without a neighbour goes up as it is."""
    above = [hash_node(level[index], level[index + 1]) for index in range(0, len(level) - 1, 2)]
    return [*above, level[-1]] if len(level) % 2 else above


def _text(value: str | int) -> bytes:
    return str(value).encode()


# --- the header ---


def header_of(seal: Seal) -> bytes:
    """The bytes that are signed."""
    return encode_fields(
        (
            FORMAT,
            _text(seal.number),
            _text(to_microseconds(seal.sealed_at)),
            _text(seal.horizon),
            _text(seal.task_count),
            _text(seal.entry_count),
            seal.root,
            seal.previous,
            _text(seal.trimmed_to),
            _text(seal.key_id),
        )
    )


def hash_header(seal: Seal | None) -> bytes:
    """What the next seal names as the one before it."""
    return NO_SEAL if seal is None else hashlib.sha256(header_of(seal)).digest()


def make_seal(unsealed: Unsealed, key: SealKey) -> Seal:
    """The next seal, signed. A tree of 100,000 leaves takes a third of a second: call it in a thread."""
    last = unsealed.last
    seal = Seal(
        number=last.number + 1 if last else 1,
        sealed_at=unsealed.now,
        horizon=unsealed.horizon,
        task_count=len(unsealed.leaves),
        entry_count=unsealed.entry_count,
        root=root_of(unsealed.leaves),
        previous=hash_header(last),
        trimmed_to=unsealed.trimmed_to,
        key_id=key.key_id,
    )
    return msgspec.structs.replace(seal, signature=key.sign(header_of(seal)))


# --- keys ---


class SealKey:
    """The private key. It is made once by `coatcheck audit keygen` and kept where the database's users cannot read."""

    def __init__(self, secret: bytes) -> None:
        self._key: Ed25519PrivateKey = _ed25519().Ed25519PrivateKey.from_private_bytes(secret)
        self.public = PublicKey(self._key.public_key().public_bytes_raw())
        self.key_id = self.public.key_id

    @classmethod
    def generate(cls) -> SealKey:
        return cls(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())

    def sign(self, header: bytes) -> bytes:
        return self._key.sign(header)

    def secret_text(self) -> str:
        """The key as `COATCHECK_SEAL_KEY` takes it."""
        return base64.b64encode(self._key.private_bytes_raw()).decode()


class PublicKey:
    """What checks signatures. `key_id` is the beginning of its SHA-256, in hex."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.key_id = hashlib.sha256(raw).hexdigest()[:16]
        self._key: Ed25519PublicKey | None = None

    @classmethod
    def parse(cls, written: str) -> PublicKey:
        """Read a key as `audit keygen` prints it. Raises InvalidSettings."""
        raw = decode_key(written)
        if raw is None:
            raise InvalidSettings(
                f"{written[:60]!r} is no public key: give the 44 characters that `coatcheck audit keygen` printed, or "
                "a file with them"
            )
        return cls(raw)

    def has_signed(self, seal: Seal) -> bool:
        """Tell whether this key signed this seal. Raises UsageError without the extra `audit`."""
        if self._key is None:
            self._key = _ed25519().Ed25519PublicKey.from_public_bytes(self.raw)
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(seal.signature, header_of(seal))
        except InvalidSignature:
            return False
        return True

    def __str__(self) -> str:
        return base64.b64encode(self.raw).decode()


def decode_key(written: str) -> bytes | None:
    """The 32 bytes of a key in base64; None: it is something else."""
    try:
        raw = base64.b64decode(written.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if len(raw) == KEY_BYTES else None


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UsageError(
            "seals need the package `cryptography`, which is not installed; run pip install 'coatcheck[audit]'"
        ) from error
    return ed25519


# --- as a document, for sinks and exports ---


def document_of(seal: Seal) -> dict[str, Any]:
    """A seal as JSON has it: bytes in hex, the time in microseconds since 1970, as it is signed."""
    return {
        "format": FORMAT.decode(),
        "number": seal.number,
        "sealed_at": seal.sealed_at.isoformat(),
        "sealed_at_us": to_microseconds(seal.sealed_at),
        "horizon": seal.horizon,
        "task_count": seal.task_count,
        "entry_count": seal.entry_count,
        "root": seal.root.hex(),
        "previous": seal.previous.hex(),
        "trimmed_to": seal.trimmed_to,
        "key_id": seal.key_id,
        "signature": seal.signature.hex(),
    }


def seal_of(document: Any) -> Seal:
    """Read a seal from a sink. Raises ValueError for what is none."""
    try:
        return Seal(
            number=int(document["number"]),
            sealed_at=datetime.fromisoformat(document["sealed_at"]),
            horizon=int(document["horizon"]),
            task_count=int(document["task_count"]),
            entry_count=int(document["entry_count"]),
            root=bytes.fromhex(document["root"]),
            previous=bytes.fromhex(document["previous"]),
            trimmed_to=int(document["trimmed_to"]),
            key_id=str(document["key_id"]),
            signature=bytes.fromhex(document["signature"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"it is no seal: {type(error).__name__}: {error}") from None
