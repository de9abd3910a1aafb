// RabbitMQ's tutorial six, the client, in Node: see rpc_client.py, which does the same.
//
//     node rpc_client.js [n] [queue]

import { randomUUID } from 'node:crypto';
import amqp from 'amqplib';

const BROKER = process.env.COATCHECK_BROKER ?? 'amqp://guest:guest@localhost:5672/';
const n = parseInt(process.argv[2] ?? '30', 10);
const queue = process.argv[3] ?? 'rpc_queue';

const connection = await amqp.connect(BROKER);
const channel = await connection.createChannel();
const { queue: replyTo } = await channel.assertQueue('', { exclusive: true });
const correlationId = randomUUID();

const answer = new Promise((resolve) => {
  channel.consume(
    replyTo,
    (reply) => {
      if (reply?.properties.correlationId === correlationId) {
        resolve(reply.content.toString());
      }
    },
    { noAck: true },
  );
});

console.log(` [x] Requesting fib(${n})`);
channel.sendToQueue(queue, Buffer.from(n.toString()), { correlationId, replyTo });
console.log(` [.] Got ${await answer}`);
await connection.close();
