"""The public suite on both stores; and a row that another release wrote, which memory cannot have."""

from coatcheck.testing.store_conformance.kit import start
from coatcheck.testing.store_conformance.sweeps import *  # noqa: F403
from coatcheck.testing.store_conformance.sweeps import look


async def test_row_that_cannot_be_read_does_not_keep_the_others_from_being_looked_at(store, sql):
    bad, good = [(await start(store)).task_id for _ in range(2)]
    await sql.execute("UPDATE coatcheck.task SET due_at = now(), look_at = now()")
    await sql.execute('UPDATE coatcheck.task SET addresses = \'[["to", "1", "newer"]]\' WHERE id = $1', bad)

    looked = await look(store)

    assert [task.task_id for task in looked.overdue] == [good]
    assert looked.unreadable == (bad,)
