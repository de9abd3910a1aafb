from coatcheck.testing.store_conformance.accepts import *  # noqa: F403 - the public suite, on both stores
