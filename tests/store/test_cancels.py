from coatcheck.testing.store_conformance.cancels import *  # noqa: F403 - the public suite, on both stores
