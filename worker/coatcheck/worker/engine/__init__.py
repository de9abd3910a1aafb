"""One execution of a handler on its journal: what it waits for, what it records, how it is put down."""
