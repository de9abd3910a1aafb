"""Alembic migrations of the `coatcheck` schema, shipped in the wheel and run by `coatcheck migrate`."""
