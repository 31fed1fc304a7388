#!/bin/sh
# Create a private bucket and two Spaces on the Hugging Face Hub, and upload what they run. Needs `hf` (huggingface_hub 2.4).
#
#   HF_TOKEN=... DELTASYNC_TOKEN=... ./create.sh OWNER [HARDWARE]
#
# HF_TOKEN must be able to create repositories, and to read and write the bucket; it becomes a secret of the server's
# Space. DELTASYNC_TOKEN protects the control routes of the server. A GPU costs money from the moment it is assigned.
set -eu
: "${HF_TOKEN:?}" "${DELTASYNC_TOKEN:?}"
owner=$1 hardware=${2:-l4x1}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

hf buckets create "$owner/wordle-feeds" --private --exist-ok
hf repos create "$owner/wordle-environment" --type space --sdk docker --exist-ok
# Values are read from the environment, so that they are in no process list.
hf repos create "$owner/wordle-server" --type space --sdk docker --exist-ok --flavor "$hardware" \
  --secrets HF_TOKEN --secrets DELTASYNC_TOKEN \
  --env "DELTASYNC_FEED=hf://buckets/$owner/wordle-feeds/run-1"
for space in environment server; do
  python3 "$here/assemble.py" "$space" "$work/$space"
  hf upload "$owner/wordle-$space" "$work/$space" . --type space
done
