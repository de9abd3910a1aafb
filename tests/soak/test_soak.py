"""The soak looks at real processes, and its plot and verdict say what it saw."""

import csv
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from bench.run import Bench
from bench.soak import Load, Sample, draw, is_growing, judge, slope_per_hour, soak, write
from tests.conftest import ServiceNames

SVG = "{http://www.w3.org/2000/svg}"


async def test_short_soak_sees_processes_connections_and_tables(
    broker_url: str, store_url: str, service_names: ServiceNames, tmp_path: Path
) -> None:
    bench = Bench(broker_url, store_url)
    bench.prefix = service_names.new("soak")
    for role in ("flows", "echo"):
        service_names.queues += [f"{bench.prefix}-{role}{suffix}" for suffix in ("", ".replies", ".control", ".dead")]
        service_names.exchanges.append(f"{bench.prefix}-{role}.broadcast")
    service_names.also_delete(f"{bench.prefix}-hints")
    try:
        samples, load = await soak(bench, for_s=4, every_s=0.5, rate=15)
    finally:
        await bench.stop()
    verdict, _ = judge(samples, load)
    write(samples, verdict, tmp_path)

    assert (load.done_count, load.wrong) == (60, [])
    last = samples[-1]
    assert all(last[f"rss_mb {name}"] > 5 and last[f"fds {name}"] > 3 for name in ("worker", "sweeper", "peer"))
    assert last["connections"] >= 2
    assert last["live_tuples"] > 60  # rows of tasks, calls and steps
    assert last["tables_mb"] > 0
    assert sum(each["tasks_per_s"] for each in samples) > 0
    with (tmp_path / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["at_s"]) for row in rows] == [each["at_s"] for each in samples]
    plot = ET.parse(tmp_path / "plot.svg")
    lines = {line.attrib["data-name"]: line.attrib["points"].split() for line in plot.iter(f"{SVG}polyline")}
    assert lines.keys() == last.keys() - {"at_s"}
    assert {len(points) for points in lines.values()} == {len(samples)}
    assert "60 tasks with the right answer, 0 without" in (tmp_path / "verdict.txt").read_text()


def course(*values: float) -> list[Sample]:
    return [{"at_s": 60.0 * minute, "rss_mb worker": value, "tasks_per_s": 5.0} for minute, value in enumerate(values)]


def test_slope_is_per_hour() -> None:
    assert slope_per_hour(course(100, 101, 102, 103), "rss_mb worker") == pytest.approx(60)
    assert slope_per_hour(course(100, 100, 100, 100), "rss_mb worker") == pytest.approx(0)


def test_what_grows_is_told_from_what_wavers() -> None:
    leaking, wavering = course(*range(100, 220, 10)), course(*[100, 110] * 6)

    assert is_growing(leaking, "rss_mb worker")
    assert not is_growing(wavering, "rss_mb worker")
    assert not is_growing(course(*(100 + n / 10 for n in range(12))), "rss_mb worker")  # noise
    verdict, is_good = judge(course(*range(100, 280, 10)), Load("research"))
    assert not is_good
    assert "GROWS" in next(line for line in verdict.splitlines() if "rss_mb worker" in line)
    assert judge(wavering, Load("research"))[1]
    assert not judge(wavering, Load("research", wrong=["nap: 'nothing'"]))[1]


def test_plot_puts_values_where_they_belong() -> None:
    plot = ET.fromstring(draw(course(50, 100)))
    (line,) = [each for each in plot.iter(f"{SVG}polyline") if each.attrib["data-name"] == "rss_mb worker"]
    (left, middle), (right, top) = (map(float, point.split(",")) for point in line.attrib["points"].split())

    assert right - left == 860
    assert middle - top == 55  # half of the panel
