"""Messages: the port, its adapters, the topology and the wire contract.

Stands alone: it knows no tasks and no tables.
"""

from coatcheck.broker.bodies import Body, BodyFormat, Limits
from coatcheck.broker.connecting import connect
from coatcheck.broker.port import (
    Broker,
    BrokerStats,
    Consumer,
    Delivery,
    HeaderValue,
    Message,
    Outgoing,
    Routing,
)
from coatcheck.broker.settings import BrokerSettings
from coatcheck.broker.topology import DEAD_EXCHANGE, SWEEPER_QUEUE, Names
from coatcheck.broker.wire import (
    Control,
    ControlKind,
    Progress,
    Reply,
    ReplyKind,
    Request,
    dead_letter,
    make_cancel,
    make_error,
    make_problem,
    make_progress,
    make_request,
    make_result,
    make_resume,
    make_timeout,
    parse_control,
    parse_reply,
    parse_request,
    revive,
)

__all__ = [
    "DEAD_EXCHANGE",
    "SWEEPER_QUEUE",
    "Body",
    "BodyFormat",
    "Broker",
    "BrokerSettings",
    "BrokerStats",
    "Consumer",
    "Control",
    "ControlKind",
    "Delivery",
    "HeaderValue",
    "Limits",
    "Message",
    "Names",
    "Outgoing",
    "Progress",
    "Reply",
    "ReplyKind",
    "Request",
    "Routing",
    "connect",
    "dead_letter",
    "make_cancel",
    "make_error",
    "make_problem",
    "make_progress",
    "make_request",
    "make_result",
    "make_resume",
    "make_timeout",
    "parse_control",
    "parse_reply",
    "parse_request",
    "revive",
]
