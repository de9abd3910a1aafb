"""The Postgres adapter: queues as tables, for development and small deployments. RabbitMQ is for scale.

sql         every SQL statement by name, with the lock order, and the tables, made on start
connection  a `pg://` address, one connection, and the supervisor that has the next one ready
codec       messages to rows and back
publisher   messages in, many in one transaction
consumer    what one connection has in hand: deliveries, consumers, acks, requeues
receiver    the one loop that fetches, settles and keeps house
broker      the port, put together from these
"""

from coatcheck.broker.postgres.broker import PostgresBroker

__all__ = ["PostgresBroker"]
