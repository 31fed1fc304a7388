#!/bin/sh
# Let Ollama import the checkpoint folder of a version under a name. Runs after each switch of `deltasync follow`:
#
#   deltasync follow s3://bucket/run-42 --target /models/live --exec "sh ollama.sh {path} policy"
#
# `ollama create` copies the weights into Ollama's own store. `ollama stop` ends the copy that is loaded, which has the
# old weights: the next request loads the new ones.
set -eu
folder=$1 name=$2
modelfile=$(mktemp)
trap 'rm -f "$modelfile"' EXIT
printf 'FROM %s\n' "$folder" >"$modelfile"
ollama create "$name" -f "$modelfile"
ollama stop "$name" || true
