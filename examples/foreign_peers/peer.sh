#!/usr/bin/env bash
# A peer in bash, with `amqp-tools`: answers with the number of words.
#
#     bash examples/foreign_peers/peer.sh QUEUE
#
# `amqp-consume` runs this script again for each question, and acknowledges it if the script succeeds. It hands over the
# body alone, on standard input, and `amqp-publish` sets no correlation id: so desk.py puts the address into the body.
set -euo pipefail

queue=$1
url=${COATCHECK_BROKER:-amqp://guest:guest@localhost:5672}
url=${url%/} # these tools take a slash at the end for a virtual host without a name

if [[ ${2-} != one ]]; then
  echo "answering on $queue"
  exec amqp-consume --url="$url" --queue="$queue.in" --prefetch-count=1 bash "$0" "$queue" one
fi

read -r reply_to
read -r correlation_id
printf '%s\n%s\n%s' "$reply_to" "$correlation_id" "$(wc -w)" |
  amqp-publish --url="$url" --routing-key="$queue.out" --persistent
