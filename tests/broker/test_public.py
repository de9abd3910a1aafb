"""What `coatcheck.broker` offers, and to whom it is allowed to talk."""

import subprocess
import sys

import coatcheck.broker


def test_everything_listed_is_there_and_everything_there_is_listed() -> None:
    listed = coatcheck.broker.__all__
    modules = {name for name in dir(coatcheck.broker) if f"coatcheck.broker.{name}" in sys.modules}
    public = {name for name in dir(coatcheck.broker) if not name.startswith("_")} - modules

    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == public


def test_broker_stands_alone_and_loads_no_driver_it_does_not_need() -> None:
    code = "import sys, coatcheck.broker; print(*sorted(sys.modules))"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()

    assert not {"coatcheck.store", "coatcheck.worker", "aiormq", "cbor2"} & set(loaded)
