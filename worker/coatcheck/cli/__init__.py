"""The command line: `coatcheck …`."""

from coatcheck.cli.main import main

__all__ = ["main"]
