from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import generate_latest

from coatcheck.worker.metrics import Metrics, describe_metrics

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_two_workers_in_one_process_count_apart():
    first, second = Metrics(), Metrics()

    first.parked.inc()
    first.claims.labels("woke").inc(3)

    assert first.registry.get_sample_value("coatcheck_tasks_parked_total") == 1
    assert first.registry.get_sample_value("coatcheck_claims_total", {"result": "woke"}) == 3
    assert second.registry.get_sample_value("coatcheck_tasks_parked_total") == 0


def test_histograms_and_gauges_record():
    metrics = Metrics()

    metrics.batch_size.labels("claim").observe(40)
    metrics.commit_seconds.labels("claim").observe(0.004)
    metrics.handler_seconds.labels("research").observe(1.5)
    metrics.overdue_age.set(2.5)
    metrics.running.inc()

    value = metrics.registry.get_sample_value
    assert value("coatcheck_batch_size_bucket", {"operation": "claim", "le": "50.0"}) == 1
    assert value("coatcheck_batch_size_bucket", {"operation": "claim", "le": "20.0"}) == 0
    assert value("coatcheck_commit_seconds_sum", {"operation": "claim"}) == 0.004
    assert value("coatcheck_handler_seconds_count", {"handler": "research"}) == 1
    assert value("coatcheck_overdue_age_seconds") == 2.5
    assert value("coatcheck_tasks_running") == 1


def test_every_metric_has_our_prefix_and_a_sentence():
    metrics = Metrics()

    families = list(metrics.registry.collect())

    assert {family.name for family in families} == set(metrics.labels)
    assert all(family.name.startswith("coatcheck_") for family in families)
    assert all(family.documentation.endswith(".") for family in families)
    assert b"coatcheck_tasks_running 0.0" in generate_latest(metrics.registry)


def test_documented_table_is_the_one_in_the_code():
    found = re.search(r"<!-- metrics:.*?-->\n(.*)<!-- /metrics -->", DOCS.read_text(encoding="utf-8"), re.DOTALL)

    assert found is not None
    assert found[1] == describe_metrics()
