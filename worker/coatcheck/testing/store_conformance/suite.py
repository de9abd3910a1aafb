"""All tests of the suite, with their fixtures: `from coatcheck.testing.store_conformance.suite import *`."""

from coatcheck.testing.store_conformance.accepts import *  # noqa: F403
from coatcheck.testing.store_conformance.cancels import *  # noqa: F403
from coatcheck.testing.store_conformance.claims import *  # noqa: F403
from coatcheck.testing.store_conformance.fixtures import *  # noqa: F403
from coatcheck.testing.store_conformance.puts import *  # noqa: F403
from coatcheck.testing.store_conformance.services import *  # noqa: F403
from coatcheck.testing.store_conformance.sweeps import *  # noqa: F403
from coatcheck.testing.store_conformance.values import *  # noqa: F403
