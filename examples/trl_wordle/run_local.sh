#!/usr/bin/env bash
# All three hosts on this one: the environment, the vLLM server and the trainer, each in a folder of its own. They share
# the URL of the store and two HTTP addresses. At the end check.py compares what is served with what was trained.
#
#   ./run_local.sh [ARGUMENTS OF trainer.py]
#
# Variables: OUT (folder, trl-wordle-run), FEED (URL, below OUT), PYTHON and VLLM_PYTHON (interpreters with TRL and with
# vLLM), SERVER_PORT (8000), ENVIRONMENT_PORT (8001). However the script ends, no process is left running.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${PYTHON:=python3}" "${VLLM_PYTHON:=$PYTHON}"
for each in "$PYTHON" "$VLLM_PYTHON"; do
  command -v "$each" >/dev/null || { echo "error: there is no $each (set PYTHON and VLLM_PYTHON)" >&2; exit 1; }
done
# Each runs in a folder of its own, so relative paths must be resolved here.
python=$(realpath -s "$(command -v "$PYTHON")") vllm_python=$(realpath -s "$(command -v "$VLLM_PYTHON")")
mkdir -p "${OUT:=trl-wordle-run}"
out=$(cd "$OUT" && pwd)
feed=${FEED:-$out/feed}
server=http://127.0.0.1:${SERVER_PORT:=8000} environment=http://127.0.0.1:${ENVIRONMENT_PORT:=8001}
export DELTASYNC_TOKEN=${DELTASYNC_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export TRL_EXPERIMENTAL_SILENCE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

# Ends all processes once this script has ended: it reads their ids from a pipe that closes with the script, however
# that ends.
exec 9> >(
  trap '' INT TERM HUP
  groups=()
  while read -r group; do groups+=("$group"); done
  for group in "${groups[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
  for _ in {1..150}; do
    alive=0
    for group in "${groups[@]}"; do kill -0 -- "-$group" 2>/dev/null && alive=1; done
    ((alive)) || break
    sleep 0.1
  done
  for group in "${groups[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
)
cleaner=$!
trap 'exec 9>&-; wait "$cleaner" || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

declare -A pids

# start NAME HOST COMMAND…: start a command in the folder of its host, as a process group of its own.
start() {
  local name=$1 host=$2
  shift 2
  mkdir -p "$out/$host"
  (cd "$out/$host" && exec setsid "$@") >>"$out/$name.log" 2>&1 </dev/null 9>&- &
  pids[$name]=$!
  echo "$!" >&9
}

# fail NAME: print why a process ended, from its log.
fail() {
  local message
  message=$(grep -a '^error: ' -A 3 "$out/$1.log" | head -n 4) || message=$(tail -n 5 "$out/$1.log")
  printf '%s\n' "$message" "the $1 has ended (its log is $out/$1.log)" >&2
  exit 1
}

is_running() { kill -0 "${pids[$1]}" 2>/dev/null; }

# has PYTHON MODULE HINT: require that the module is installed there.
has() {
  "$1" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$2') is None)" && return
  echo "error: $2 is not installed for $1 ($3)" >&2
  exit 1
}

has "$python" trl "pip install 'deltasync[trl]', or set PYTHON"
has "$python" deltasync "pip install 'deltasync[trl]', or set PYTHON"
has "$vllm_python" vllm "pip install 'deltasync[vllm]', or set VLLM_PYTHON"
has "$vllm_python" deltasync "pip install 'deltasync[vllm]', or set VLLM_PYTHON"

for name in environment model server trainer check; do : >"$out/$name.log"; done
start environment environment "$python" "$here/environment.py" --port "$ENVIRONMENT_PORT"
until grep -q http "$out/environment.log"; do
  is_running environment || fail environment
  sleep 0.1
done
if [[ ! -e $out/trainer/wordle-policy ]]; then
  echo "making a policy that plays badly"
  start model trainer "$python" "$here/make_model.py" wordle-policy
  wait "${pids[model]}" || fail model
fi
mirror=$out/server/mirror.safetensors
start server server "$vllm_python" "$here/server.py" --feed "$feed" --port "$SERVER_PORT" --mirror "$mirror"
start trainer trainer "$python" "$here/trainer.py" --feed "$feed" --server "$server" --environment "$environment" "$@"
tail -n +1 -f --pid="${pids[trainer]}" "$out/trainer.log" 9>&- | grep -a --line-buffered '^step ' 9>&- &
lines=$!
while is_running trainer; do
  for name in environment server; do is_running "$name" || fail "$name"; done
  sleep 0.5
done
wait "${pids[trainer]}" || fail trainer
wait "$lines" || true
start check trainer "$python" "$here/check.py" --feed "$feed" --server "$server" --mirror "$mirror" --run run
wait "${pids[check]}" || fail check
cat "$out/check.log"
