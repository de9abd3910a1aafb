import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import structlog
from tests.broker.rigs import as_broker
from tests.flow.harness import Rig, rig_on
from tests.flow.outages import OwnPostgres

from coatcheck.broker import connect
from coatcheck.store.postgres import database

# What runs with queues in Postgres too: at least one of each thing a broker can do to a task.
ON_POSTGRES_TOO = {
    "test_waiting": {
        "test_task_waits_as_rows_only_and_ends_when_all_replies_are_in",
        "test_same_reply_delivered_twice_to_two_replicas_is_applied_once",
        "test_last_two_replies_at_the_same_instant_on_two_replicas_resume_once",
        "test_reply_after_its_timeout_is_late_and_peer_hears_a_cancel",
        "test_peers_error_reaches_the_handler_with_its_problem",
        "test_call_to_a_queue_that_does_not_exist_fails_with_no_route",
        "test_progress_of_a_task_reaches_whoever_asked",
        "test_traceparent_travels_through_the_call",
    },
    "test_killing": {
        "test_replica_that_put_the_task_down_is_killed_and_another_finishes_it",
        "test_crash_around_the_checkpoint_sends_every_call_and_ends_once",
        "test_crash_after_the_final_commit_still_sends_the_reply",
        "test_crash_in_a_resumed_handler_is_taken_over_by_the_redelivered_reply",
        "test_replicas_and_sweeper_killed_at_random_lose_nothing",
    },
    "test_outages": {
        "test_backends_killed_under_load_lose_and_double_nothing",
        "test_run_goes_on_through_a_cut_and_its_redelivered_request_attaches",
        "test_redelivery_to_another_replica_leaves_one_final_reply",
        "test_reply_that_comes_back_attaches_to_the_run_it_woke",
        "test_broker_away_at_the_park_leaves_calls_unsent_until_it_is_back",
        "test_publish_that_fails_after_the_commit_brings_the_trigger_back",
        "test_final_reply_that_could_not_be_sent_is_sent_once_when_the_trigger_is_back",
        "test_connections_cut_under_load_lose_nothing",
    },
    "test_cancelling": {
        "test_cancel_of_a_parked_task_closes_its_calls_and_tells_the_peers",
        "test_cancel_by_the_requesters_correlation_id_in_plain_amqp",
        "test_cancel_of_a_task_running_on_another_replica_stops_its_handler",
        "test_cancel_of_a_task_that_has_not_begun_leaves_a_tombstone_that_answers",
        "test_cancels_that_wait_beside_their_requests_are_read_first",
        "test_cancels_that_wait_are_read_first_after_an_outage_too",
        "test_cancel_racing_with_completion_gives_one_final_state_and_one_kind_of_answer",
    },
    "test_leases": {
        "test_long_run_gives_its_message_back_and_goes_on_under_its_lease",
        "test_draining_hands_a_run_over_at_once_that_was_detached_by_a_cut",
        "test_draining_gives_a_run_without_a_row_back_and_does_not_begin_it_again",
        "test_two_sweepers_time_a_call_out_once",
        "test_killed_sweeper_is_replaced_by_another",
        "test_sweeper_waits_an_outage_out_and_is_not_late_afterwards",
        "test_hint_wakes_a_sweeper_that_sleeps_for_long",
    },
    "test_requests": {
        "test_request_duplicated_while_parked_running_and_ended_has_one_effect_and_one_answer",
        "test_second_requester_of_the_same_task_is_answered_too",
        "test_same_identity_with_another_body_is_refused",
        "test_result_whose_requester_is_gone_stays_fetchable",
        "test_submitted_result_is_kept_and_call_returns_it_directly",
    },
    "test_modes": {
        "test_off_waits_in_ram_with_the_original_unacked_and_no_postgres",
        "test_off_wait_lives_through_a_cut_connection",
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "broker_kind" in metafunc.fixturenames:
        chosen = ON_POSTGRES_TOO.get(metafunc.module.__name__.rpartition(".")[2], set())
        if metafunc.function.__name__ in chosen:
            metafunc.parametrize("broker_kind", ["amqp", "pg"])


@pytest.fixture
def broker_kind() -> str:
    """RabbitMQ, unless a test is one of those that run on queues in Postgres too."""
    return "amqp"


@pytest.fixture
def urls(request: pytest.FixtureRequest, broker_kind: str, store_url: str) -> tuple[str, str]:
    """The addresses of broker and store."""
    broker_url = as_broker(store_url) if broker_kind == "pg" else request.getfixturevalue("broker_url")
    return broker_url, store_url


@pytest.fixture
async def rig(urls: tuple[str, str], service_names) -> AsyncIterator[Rig]:
    """One test's own servers' corner: a fresh database, unique queue names, everything stopped and removed
    afterwards.
    """
    async with rig_on(*urls, service_names) as made:
        yield made


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Only what went wrong is worth reading next to a failed test."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


@pytest.fixture
def impatient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on a silent Postgres after a second; half a minute would only make the tests longer."""
    defaults = database.Database.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setattr(database, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setitem(defaults, "command_timeout_s", 1.0)


@pytest.fixture
def impatient_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on a broker that does not answer after half a second, and look for it often."""
    impatient = partial(connect, publish_timeout=0.5, backoff_max=0.3)
    monkeypatch.setattr("coatcheck.worker.worker.connect", impatient)
    monkeypatch.setattr("coatcheck.worker.sweeper.connect", impatient)


@pytest.fixture
def own_postgres() -> Iterator[OwnPostgres]:
    """A server to crash. Ask for it before `rig`, so that it outlives the replicas on it."""
    with ExitStack() as running:
        yield OwnPostgres(running)
