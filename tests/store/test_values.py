from coatcheck.testing.store_conformance.values import *  # noqa: F403 - the public suite, on both stores
