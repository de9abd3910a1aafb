"""What a user declares: a service, its handlers, and who may call it. Nothing here touches a server.

Callers. The app's hook `identify` turns a request's token into a caller; the token goes no further than that hook. A
caller is kept with its task, so that any replica knows it after a resume, when the token has long expired.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Literal, TypeAlias, TypeVar, overload

import msgspec

from coatcheck.broker.bodies import Limits
from coatcheck.broker.port import Message
from coatcheck.broker.topology import Names
from coatcheck.broker.wire import find_token
from coatcheck.errors import MalformedMessage, TransientError, Unauthorized, UsageError
from coatcheck.log import get_logger
from coatcheck.store.rows import Caller, HistoryLevel
from coatcheck.worker.binding import Binding
from coatcheck.worker.events import OnEvent
from coatcheck.worker.retry import Retry
from coatcheck.worker.settings import History, Settings

if TYPE_CHECKING:
    from coatcheck.worker.engine.context import Context

log = get_logger(__name__)

# A type checker flags a plain `def`, and a function that does not take the context first.
Function = TypeVar("Function", bound="Callable[Concatenate[Context, ...], Coroutine[Any, Any, Any]]")

Identify: TypeAlias = Callable[[str | None], Caller | Awaitable[Caller | None] | None]

ONCE = Retry(attempts=1)
LONGEST_SUBJECT = 255
LARGEST_CLAIMS = 16 * 1024


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered task function and its policies."""

    name: str
    binding: Binding
    retry: Retry
    is_deduplicated: bool
    history: HistoryLevel | None = None
    """None: as the settings say."""
    redoes_damage: bool = False


class App:
    """A service: a name, and the handlers its replicas run.

    `identify` is called with each request's bearer token, or None, and returns who asked: a `Caller`, or None for
    an anonymous caller. If it raises, the request is refused with the problem `unauthorized`. It may be async. Without
    it tokens are not read.

    `on_event` is called with each event of a task, after what it tells of is committed: parked, resumed, finished,
    checkpoint saved or failed, and more. It is a plain function, called on the event loop. What it raises is logged and
    changes nothing.

    `history` is what is kept of what happened to a task: `"off"`, `"outcome"` or `"full"`; by default what the settings
    say, and that is `outcome`.

    `settings` are keyword overrides of anything in `Settings`; what is not given comes from the environment.
    """

    def __init__(
        self,
        service: str,
        *,
        version: str = "1",
        identify: Identify | None = None,
        on_event: OnEvent | None = None,
        history: str | None = None,
        **settings: Any,
    ) -> None:
        hook: object = on_event  # typed, but by users
        if hook is not None and (not callable(hook) or inspect.iscoroutinefunction(hook)):
            raise UsageError(f"on_event={hook!r} must be a plain function of one event: nothing awaits it")
        self.names = Names(service)
        self.service = service
        self.version = version
        self.identify = identify
        self.on_event = on_event
        if history is not None:
            settings["history"] = check_history_level(f"App({service!r})", history)
        self._overrides = settings
        self._handlers: dict[str, Handler] = {}
        self._default: str | None = None

    def __repr__(self) -> str:
        return f"App({self.service!r}, handlers={sorted(self._handlers)})"

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return self._handlers

    def load_settings(self, **overrides: Any) -> Settings:
        """The settings a process of this app runs with: `overrides`, then the app's own, then the environment."""
        given = {name: value for name, value in overrides.items() if value is not None}
        return Settings.load(**(self._overrides | given))

    @overload
    def task(self, function: Function, /) -> Function: ...

    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        retry: Retry | None = None,
        dedup: bool = False,
        default: bool = False,
        history: str | None = None,
        on_damage: Literal["hold", "redo"] = "hold",
    ) -> Callable[[Function], Function]: ...

    def task(
        self,
        function: Function | None = None,
        /,
        *,
        name: str | None = None,
        retry: Retry | None = None,
        dedup: bool = False,
        default: bool = False,
        history: str | None = None,
        on_damage: Literal["hold", "redo"] = "hold",
    ) -> Function | Callable[[Function], Function]:
        """Register a handler: `async def handler(ctx, …)`.

        `retry` repeats it after an exception (by default it runs once). `dedup` makes a duplicate of a request that
        never waited get the first answer too, at the price of one write. `default` takes requests that name no
        handler; a service with one handler needs no default. `history` is the app's, unless given.
        `on_damage="redo"` does recorded work anew whose stored value cannot be read; by default such a task is held for
        a person to decide. Raises UsageError for a function that cannot be one.
        """

        if on_damage not in ("hold", "redo"):
            raise UsageError(f"on_damage={on_damage!r} must be 'hold' or 'redo'")

        def register(function: Function) -> Function:
            binding = Binding.of(function, name=name)
            if binding.name in self._handlers:
                other = self._handlers[binding.name].binding.location
                raise UsageError(
                    f"{binding.location}: {self.service} has a handler {binding.name!r} already, at {other}"
                )
            level = None if history is None else check_history_level(binding.location, history).level
            self._handlers[binding.name] = Handler(
                binding.name, binding, retry or ONCE, dedup, level, redoes_damage=on_damage == "redo"
            )
            if default:
                if self._default is not None:
                    raise UsageError(f"{binding.location}: {self._default!r} is the default handler already")
                self._default = binding.name
            return function

        return register if function is None else register(function)

    def find_handler(self, name: str | None) -> Handler | None:
        """The handler a request means; None if this code has no such handler."""
        if name is not None:
            return self._handlers.get(name)
        if self._default is not None:
            return self._handlers[self._default]
        if len(self._handlers) == 1:
            return next(iter(self._handlers.values()))
        return self._handlers.get(self.service)

    def explain_unknown(self, name: str | None) -> str:
        """Say why a request found no handler, and what would help."""
        known = ", ".join(sorted(self._handlers)) or "none at all"
        if name is None:
            fix = "name one (`--task`, `task=`, the message's type), or declare one with default=True"
            return f"{self.service} has no default handler (it has: {known}); {fix}"
        near = difflib.get_close_matches(name, self._handlers, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "deploy code that has it, or cancel the task"
        return f"{self.service} has no handler {name!r} (it has: {known}); {fix}"


# --- callers ---


async def find_caller(identify: Identify | None, message: Message, limits: Limits) -> Caller | None:
    """Ask the app's hook who sent a request. Without a hook no caller is known, and the token is not even read.

    Raises Unauthorized if the hook does not accept the caller, TransientError if it says that it cannot tell now.
    """
    if identify is None:
        return None
    try:
        token = find_token(message, limits)
    except MalformedMessage as error:
        raise Unauthorized(error.detail) from None
    try:
        answer = identify(token)
        return _checked(await answer if inspect.isawaitable(answer) else answer)
    except (Unauthorized, TransientError):
        raise
    except Exception as error:  # noqa: BLE001 - user code: if it raises, the caller is not accepted
        # Its name only: the text may quote the token, and goes to logs and to the requester.
        name = type(error).__name__
        if isinstance(error, UsageError):
            log.error("identify_unusable", detail=str(error))  # ours: it quotes nothing
        else:
            log.warning("identify_failed", exception=name)
    raise Unauthorized(f"the caller was not accepted ({name})")


def _checked(caller: object) -> Caller | None:
    """Raise UsageError for what a row cannot hold; its text quotes nothing."""
    if caller is None:
        return None
    if not isinstance(caller, Caller):
        raise UsageError(f"identify returned a {type(caller).__name__}; it must return a Caller or None")
    given: object = caller.subject  # typed, but by users
    if not isinstance(given, str) or not 1 <= len(given) <= LONGEST_SUBJECT:
        raise UsageError(f"a caller's subject must be a text of 1 to {LONGEST_SUBJECT} characters")
    try:
        subject, claims = given.encode(), msgspec.json.encode(dict(caller.claims))
    except (TypeError, ValueError, RecursionError, OverflowError):
        raise UsageError("a caller's claims must be an object that JSON can hold") from None
    if len(claims) > LARGEST_CLAIMS:
        raise UsageError(f"a caller's claims take {len(claims):,} bytes; the limit is {LARGEST_CLAIMS:,}")
    if b"\0" in subject or b"\\u0000" in claims:
        raise UsageError("a caller's subject and claims must not contain a NUL: Postgres refuses it")
    return Caller(given, msgspec.json.decode(claims))  # as any replica will read it from the row


def check_history_level(where: str, written: str) -> History:
    """The level of that name. Raises UsageError that lists them."""
    try:
        return History(written)
    except ValueError:
        raise UsageError(f"{where}: history={written!r} must be one of {', '.join(History)}") from None
