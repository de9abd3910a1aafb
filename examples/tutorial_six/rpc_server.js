// RabbitMQ's tutorial six, the server, in Node: see rpc_server.py, which does the same.
//
//     node rpc_server.js [queue]

import amqp from 'amqplib';

const BROKER = process.env.COATCHECK_BROKER ?? 'amqp://guest:guest@localhost:5672/';
const queue = process.argv[2] ?? 'rpc_queue';

const connection = await amqp.connect(BROKER);
const channel = await connection.createChannel();
await channel.assertQueue(queue, { durable: false });
await channel.prefetch(1);
await channel.consume(queue, (request) => {
  if (request === null) {
    throw new Error(`the queue ${queue} was deleted`);
  }
  const n = parseInt(request.content.toString(), 10);
  console.log(` [.] fib(${n})`);
  const { replyTo, correlationId } = request.properties;
  channel.sendToQueue(replyTo, Buffer.from(fib(n).toString()), { correlationId });
  channel.ack(request);
});
console.log(' [x] Awaiting RPC requests');

function fib(n) {
  return n < 2 ? n : fib(n - 1) + fib(n - 2);
}
