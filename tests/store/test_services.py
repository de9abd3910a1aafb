from coatcheck.testing.store_conformance.services import *  # noqa: F403 - the public suite, on both stores
