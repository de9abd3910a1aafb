"""What our log events mean, in a sentence each: for the line itself and for the table in `docs/operations.md`.

Names of events are short facts for programs. A warning or an error carries its sentence as `about`, so that an operator
can read it without this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ERRORS", "EVENTS", "INFOS", "WARNINGS", "describe_events"]

INFOS: Mapping[str, str] = MappingProxyType(
    {
        "broker_connected": "a connection to the broker is up",
        "cancel_ruled": "a cancel was taken; `verdict` says whether it applied, or the task had ended",
        "destination_took_again": "a queue that refused messages takes them again",
        "final_reply_refused": "the queue for an answer refuses it, as a full one does; the sweeper sends it later",
        "health_server_started": "/livez, /readyz and /metrics are served",
        "long_run_detached": "a run took longer than COATCHECK_LONG_RUN_LIMIT; it goes on without its message",
        "replica_started": "a replica under `--processes` is ready",
        "request_answered_again": "a request came again after its task had ended, and got the same answer",
        "request_known": "a request came again; its task is not run twice",
        "request_reattached": "a request came back to the process that still runs its task",
        "schema_migrated": "the database schema is up to date",
        "seal_made": "a seal of histories, whole: the sink `log:` writes it here",
        "stop_requested": "a signal asked this process to stop",
        "store_found": "Postgres answers again; consuming goes on",
        "supervisor_started": "the supervisor of `--processes` runs",
        "supervisor_stopped": "the supervisor has ended, and all its replicas",
        "sweeper_in_worker": "a worker sweeps for itself: its broker lives in its process, and no other one reaches it",
        "sweeper_seen": "a sweeper runs again; what was due is sent now",
        "sweeper_started": "a sweeper runs; `settings` are those that differ from the defaults",
        "sweeper_stopped": "a sweeper has ended",
        "swept": "a sweeper found something due and sent it",
        "task_cancelled": "a run was stopped by a cancel",
        "task_finished": "a task reached its end; `outcome` says which",
        "task_parked": "a task waits in Postgres for replies or time; nothing of it is in RAM",
        "task_resumed": "a wait is over, and the task goes on here",
        "tasks_retired": "a sweeper removed tasks that had ended and were kept for long enough",
        "trigger_reattached": "a message came back to the process that still runs its task",
        "worker_draining": "a worker takes nothing new and finishes what it runs",
        "worker_started": "a worker is ready; `settings` are those that differ from the defaults",
        "worker_stopped": "a worker has ended in good order",
    }
)

WARNINGS: Mapping[str, str] = MappingProxyType(
    {
        "answer_dropped": "an answer that no row remembers was dropped, as its reply queue refused it for long",
        "asyncio_differs": "this Python's asyncio has changed in a way that this release does not know; update it",
        "attempt_failed": "a handler raised; its task is tried again after `retry_in_s`",
        "body_field_not_read": "a request has a field that its handler does not read; look for a typo",
        "broadcast_refused": "a message between replicas could not be read and was dropped; nothing depends on it",
        "broker_behind_pooler": "the address of the broker in Postgres leads to a pooler; name Postgres itself",
        "broker_blocked": "RabbitMQ has stopped taking messages because it lacks memory or disk; look at its alarms",
        "broker_connect_failed": "the broker cannot be reached; it is tried again for as long as it takes",
        "broker_link_aborted": "a connection to the broker did not answer and was given up; another one is made",
        "broker_link_lost": "a connection to the broker was lost; another one is made",
        "broker_sessions_buried": "a process that used the broker in Postgres has died; its messages go to others",
        "caller_not_known_now": "the app's `identify` could not be asked just now; the request is tried again",
        "calls_had_no_route": "a call went to a service that has no queue; the caller gets the error `no_route`",
        "calls_not_sent": "calls could not be published; they are sent again",
        "checkpoint_large": "a task stores much with each wait; store a reference instead of the data",
        "cleanup_raised": "a handler's cleanup raised while its task was put down; the task itself is safe",
        "connection_exposed": "a connection to another machine is not encrypted; `silence` says how to accept that",
        "consumer_deaf": "a queue has messages and its consumer gets none; the consumer is opened again",
        "consumer_lost": "the broker took back the messages of a queue; they come again, here or elsewhere",
        "consumer_not_opened": "a queue cannot be consumed just now; it is tried again",
        "consumer_not_switched": "consuming could not be paused or resumed, as the broker is away",
        "damage_not_redone": "a stored value cannot be read and is not done anew; the task is held. `reason` says why",
        "order_not_told": "an order is in, and the broker was not reached: peers and the sweeper have not heard of it",
        "dead_letter_not_sent": "a message that cannot be used could not be moved to the dead letters; it comes again",
        "dead_letter_refused": "the dead-letter queue refuses a message, as a full one does; it is tried again",
        "deadline_exceeded": "a request was read after its requester had stopped waiting; it was answered and not run",
        "destination_refused": "a queue refuses messages, as a full one does; they wait in rows, and others are served",
        "embedded_server_restarted": "the embedded Postgres had died and runs again",
        "end_not_recorded": "a task's end could not be stored, as Postgres is away; its answer was sent",
        "exited_at_once": "a second signal ended this process without draining; its tasks go on elsewhere",
        "final_reply_had_no_route": "the queue that a requester named for its answer is gone; the result is kept",
        "handler_waits_for_nothing": "all branches of a handler wait for each other or for nothing; `lines` says where",
        "history_entry_not_kept": "`ctx.record` kept nothing, as the task has no history; `fix` says how it would",
        "identify_failed": "the app's `identify` raised; the request was refused",
        "identity_conflict": "two different requests came with the same identity; the second was refused",
        "lease_lost": "a run took too long to renew its lease, and another replica has the task; nothing runs twice",
        "leases_not_given_up": "leases could not be ended while stopping; other replicas take over when they run out",
        "log_lines_lost": "lines are missing here: the log stream was closed, full or blocked",
        "long_sleep_holds_run": "a handler sleeps in RAM; `fix` says how to make it wait in Postgres",
        "loop_blocked": "code at `line` kept the event loop busy, and every other task waited for it; `fix` says how",
        "marks_not_written": "Postgres could not note which calls were sent; a few may be sent twice",
        "message_properties_undecodable": "a message has properties that cannot be read; it goes to the dead letters",
        "order_interrupted": "a cancel could not be seen through, as a server is away; it comes again",
        "orders_not_taken_first": "cancels could not all be read before the first requests; they are read beside them",
        "own_queue_gone": "a queue of this service was deleted; it is made again if this process may do so",
        "password_shown": "a password on the command line is seen by every user of the machine; use a variable",
        "queue_declared_again": "a queue of this service was deleted, and is made again",
        "queue_not_declared": "a queue of this service is missing and could not be made",
        "queue_used_as_it_is": "a queue has other arguments than ours; it is used, `differences` says what is lost",
        "ram_reply_refused": "a reply to a task in RAM could not be read and was dropped",
        "recorded_arguments_differ": "a call has other arguments than the recorded one; the recorded result is used",
        "replica_ended": "a replica under `--processes` ended by itself; another one is started after `pause_s`",
        "reply_address_refused": "a requester's reply address was refused by RabbitMQ; it gets no answer",
        "reply_interrupted": "a reply could not be recorded, as a server is away; it comes again",
        "reply_refused": "a reply to this client could not be read and was dropped",
        "request_interrupted": "a request could not be seen through, as the broker is away; it comes again",
        "request_refused": "a request does not fit its handler; the requester was told why",
        "request_unauthorized": "the app's `identify` refused a request; the requester was told",
        "resending_interrupted": "messages could not be sent again, as a server is away; they come up again",
        "resumes_not_sent": "runs that were cut short could not be handed on; a sweeper finds them by their leases",
        "row_held": "another transaction holds a row for long; look for open transactions in Postgres",
        "run_held_in_ram": "a task could wait in Postgres but for the code at `lines`; `fix` says how",
        "run_superseded": "another replica has this task; what this one did was not recorded",
        "runs_cut_short": "runs did not end within COATCHECK_GRACE; other replicas go on with their tasks",
        "seal_not_written": "a sink does not take a seal; it is in the database, and tried again",
        "sealing_interrupted": "histories could not be sealed, as Postgres is away; it is tried again",
        "setting_ignored": "a variable has no effect; `detail` says which, and what was meant",
        "settling_interrupted": "a run's end could not be recorded or sent, as a server is away; it is tried again",
        "store_awaited": "Postgres cannot be reached; the sweeper tries again",
        "store_lost": "Postgres cannot be reached; consuming is paused until it answers, and nothing is lost",
        "sweep_interrupted": "a sweep could not be finished, as a server is away; it is repeated",
        "sweeper_missing": "no sweeper runs: timeouts, sleeps and retries wait; start `coatcheck sweeper`",
        "task_fell_to_ram": "Postgres is away, so a task waits in RAM; if this process dies, it starts afresh",
        "tasks_not_counted": "the tasks could not be counted for the metrics; they are counted again later",
        "too_many_requesters": "a task has as many addresses to answer as it may have; this requester was told so",
    }
)

ERRORS: Mapping[str, str] = MappingProxyType(
    {
        "branch_left_behind": "a handler's cleanup at `line` does not end; `fix` says what to change",
        "broker_receiver_failed": "a bug of ours in the broker in Postgres; it goes on. Please report it",
        "broker_task_crashed": "a bug of ours in the broker's client; restart this process. Please report it",
        "call_body_damaged": "the stored body of a call cannot be read, so it is not sent; restore its row",
        "commit_refused": "Postgres will never take what a task wants recorded, so the task failed; `detail` says why",
        "delivery_not_buried": "a message that fails again and again could not be moved to the dead letters",
        "delivery_not_requeued": "a message could not be given back; it comes again when the connection ends",
        "delivery_surprised": "a bug of ours while handling a message; it is tried five times. Please report it",
        "detach_refused": "Postgres will never take what a long run wants recorded; the run was stopped",
        "embedded_server_lost": "the embedded Postgres has died and does not start; `error` says why",
        "frame_not_understood": "RabbitMQ sent something that cannot be read; the connection is made again",
        "gate_not_heard": "a bug of ours while pausing or resuming; restart this process. Please report it",
        "handler_stayed_unknown": "a handler was missing for COATCHECK_HOLD_UNKNOWN; the request was failed",
        "identify_unusable": "the app's `identify` returns something that cannot be used; `detail` says what",
        "lease_not_renewed": "Postgres was away for so long that a run stopped itself; another replica goes on with it",
        "message_buried": "a message cannot be used and is in the dead letters: `coatcheck dead ls`",
        "on_delivery_failed": "a bug of ours in taking a message; it comes again. Please report it",
        "on_event_failed": "the app's `on_event` raised, at `line`; told once for each kind, and it changes nothing",
        "on_lost_failed": "a bug of ours after a connection was lost. Please report it",
        "orphans_repaired": "tasks had nothing to wake them, and were repaired: a bug of ours. Please report it",
        "replica_killed": "a replica did not stop in time and was killed; its tasks go on elsewhere",
        "row_cannot_be_sent": "a row holds a message that the broker will never take; `error` says why",
        "rows_unreadable": "rows that are due cannot be read by this release; the others are dealt with; look at them",
        "seal_refused": "Postgres does not take a seal, as when tables were changed by hand: `coatcheck audit verify`",
        "seals_removed": "seals that were there are gone from the database: `coatcheck audit verify`, with a sink",
        "stored_answer_damaged": "the stored answer of a task cannot be read; its requester was told `damaged_value`",
        "supervisor_gave_up": "no replica runs and none starts; `why` says more",
        "sweep_surprised": "a bug of ours in a sweep; it goes on. Please report it",
        "task_crashed_repeatedly": "a task ended its process several times in a row, so it failed: look at its handler",
        "task_failed": "a handler raised and is not tried again: `coatcheck show TASK` has the traceback",
        "task_damaged": "a stored value cannot be read; the task goes on from just before it, as its handler says",
        "task_held": "this code cannot run the task; it is kept until code comes that can. `reason` says why",
    }
)

EVENTS: Mapping[str, str] = MappingProxyType({**INFOS, **WARNINGS, **ERRORS})
"""Every event that a process of ours logs at `info` or above, and what it means."""


def describe_events() -> str:
    """Return the table of `docs/operations.md`."""
    lines = ["| event | level | meaning |", "|---|---|---|"]
    for level, events in (("error", ERRORS), ("warning", WARNINGS), ("info", INFOS)):
        lines += [f"| `{name}` | {level} | {about} |" for name, about in events.items()]
    return "\n".join(lines) + "\n"
