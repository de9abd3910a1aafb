// A peer in Node: answers with the longest word.
//
//     node examples/foreign_peers/peer.js QUEUE

import amqp from 'amqplib';

const queue = process.argv[2];
const connection = await amqp.connect(process.env.COATCHECK_BROKER ?? 'amqp://guest:guest@localhost:5672/');
const channel = await connection.createConfirmChannel();
await channel.assertQueue(queue, { durable: true, arguments: { 'x-queue-type': 'quorum' } });
await channel.prefetch(10);

await channel.consume(queue, async (question) => {
  if (question === null) throw new Error(`the queue ${queue} was deleted`);
  const { replyTo, correlationId } = question.properties;
  const words = JSON.parse(question.content.toString()).split(/\s+/);
  const longest = words.reduce((one, other) => (other.length > one.length ? other : one));
  channel.sendToQueue(replyTo, Buffer.from(JSON.stringify(longest)), { correlationId, persistent: true });
  await channel.waitForConfirms();
  channel.ack(question); // last: a crash before this line asks again
});
console.log(`answering on ${queue}`);
