"""The public face of the package is what its __all__ says."""

import inspect

from coatcheck import embedded


def test_public_names_are_listed() -> None:
    public = {name for name, it in vars(embedded).items() if not name.startswith("_") and not inspect.ismodule(it)}

    assert public == set(embedded.__all__)
