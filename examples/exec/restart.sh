#!/bin/sh
# Restart a container whose engine reads the folder only when it starts, such as text-generation-inference, and wait until
# it answers. Runs after each switch of `deltasync follow`:
#
#   docker run --name tgi -v /models:/models:ro -p 8080:80 IMAGE --model-id /models/live
#   deltasync follow s3://bucket/run-42 --target /models/live \
#       --exec "sh restart.sh tgi http://127.0.0.1:8080/health" --exec-timeout-s 1800
#
# It mounts the parent of the folder, because the folder is a link that leads elsewhere after each switch.
set -eu
container=$1 health=$2
docker restart "$container"
until curl -fsS -o /dev/null --max-time 5 "$health"; do
  # A container that has ended does not come back by itself.
  [ "$(docker inspect -f '{{.State.Running}}' "$container")" = true ] || { echo "error: $container has ended" >&2; exit 1; }
  sleep 1
done
