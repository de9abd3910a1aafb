"""The store under the name it had while Postgres was the only one."""

from coatcheck.store.front import OpenStore, Store

__all__ = ["OpenStore", "Store"]
