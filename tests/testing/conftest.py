"""The kit's own fixture, as the plugin gives it; taken from there, so that it is also there where the entry point is
not installed yet."""

from coatcheck.testing.plugin import coatcheck

__all__ = ["coatcheck"]
