"""The store on Postgres: statements, a pool, and the operations that use them."""
