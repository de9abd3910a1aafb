"""The makers of the public suite, under the name that tests know them by."""

from coatcheck.testing.store_conformance.kit import *  # noqa: F403
