"""The RabbitMQ adapter.

socket          the bytes of a connection: messages and confirms are ours, all the rest is the driver's
codec           messages to frames and back
connection      an address, one connection, and the supervisor that has the next one ready
queues          what is declared, and queues that another program made otherwise
publisher       messages out, each with a fate of its own
direct_replies  replies to direct reply-to addresses, kept away from everything else
session         the deliveries of one channel, and what was said of them
consumer        one consumer, over one session after the other
broker          the port, put together from these
"""
