"""The Postgres adapter: queues as tables, for development and small deployments. RabbitMQ is for scale.

address     a `pg://` URL, taken apart
schema      the tables, made on start
statements  every SQL statement, and the lock order
codec       messages to rows and back
link        one connection, and the supervisor that has the next one ready
publisher   batches in, one transaction each
session     what one connection has in hand: deliveries, acks, requeues
receiver    the one loop that fetches, settles and keeps house
keeper      gives back what the dead held, and clears what nobody needs
broker      the port, put together from these
"""

from coatcheck.broker.postgres.broker import PostgresBroker

__all__ = ["PostgresBroker"]
