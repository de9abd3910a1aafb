from coatcheck.testing.store_conformance.puts import *  # noqa: F403 - the public suite, on both stores
