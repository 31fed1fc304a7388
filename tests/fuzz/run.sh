#!/bin/sh
# Builds the fuzz target with address and undefined-behaviour sanitizers, replays the corpus, then fuzzes.
#
#   tests/fuzz/run.sh SECONDS [OPTION OF LIBFUZZER...]
#
# 0 seconds: only the corpus. What is found lies in build/fuzz: inputs that fail as crash-*, new ones in corpus/.
set -eu

[ $# -ge 1 ] || { echo "usage: tests/fuzz/run.sh SECONDS [OPTION...]" >&2; exit 2; }
seconds=$1
shift

cd "$(dirname "$0")/../.."
cxx=${CXX:-clang++}
build=${FUZZ_BUILD:-build/fuzz}
sanitizers=fuzzer-no-link,address,undefined
if ! command -v "$cxx" >/dev/null; then
    echo "error: the fuzz target needs clang++ (found no '$cxx'); install clang, or name it in CXX" >&2
    exit 1
fi
mkdir -p "$build/corpus"
if ! echo 'int main() {}' | "$cxx" -x c++ - -fsanitize=address,undefined -o "$build/probe" 2>"$build/probe.log"; then
    echo "error: '$cxx' cannot link its sanitizers; on Debian install libclang-rt-dev. It says:" >&2
    cat "$build/probe.log" >&2
    exit 1
fi

# The instruction sets that this machine has; AVX-512 emulated where it lacks it and SIMDe is installed.
avx2="-mavx2 -mbmi -mbmi2 -mpopcnt"
avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mbmi -mbmi2 -mpopcnt"
case "$(uname -m)" in x86_64 | amd64) ;; *) avx2="" avx512="" ;; esac
if ! grep -qs avx512bw /proc/cpuinfo; then
    if echo '#include <simde/x86/avx512.h>' | "$cxx" -x c++ -fsyntax-only - 2>/dev/null; then
        avx512=-DDELTASYNC_SIMDE
    fi
fi

compile() {
    source=$1
    shift
    object=$build/$(basename "$source" .cpp).o
    # shellcheck disable=SC2086
    "$cxx" -std=c++20 -O2 -g -fno-strict-aliasing -fno-omit-frame-pointer -fsanitize=$sanitizers \
        -fno-sanitize-recover=all -Inative "$@" -c "$source" -o "$object" &
    objects="$objects $object"
    compilers="$compilers $!"
}

target=$build/decode_fuzz
if [ ! -x "$target" ] || [ -n "$(find native tests/fuzz -newer "$target" \( -name '*.?pp' -o -name run.sh \))" ]; then
    objects="" compilers=""
    for source in native/*.cpp tests/fuzz/decode_fuzz.cpp; do
        case "$source" in
            */module.cpp) ;; # the binding to Python
            # shellcheck disable=SC2086
            */isa_avx2.cpp) compile "$source" $avx2 ;;
            # shellcheck disable=SC2086
            */isa_avx512.cpp) compile "$source" $avx512 ;;
            *) compile "$source" ;;
        esac
    done
    # One at a time, because only then a failure ends this script.
    for compiler in $compilers; do wait "$compiler"; done
    # shellcheck disable=SC2086
    "$cxx" -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $objects -o "$target"
fi

export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
options="-artifact_prefix=$build/ -max_len=4096 -timeout=20 -rss_limit_mb=2048"
# shellcheck disable=SC2086
"$target" $options -runs=0 "$build/corpus" tests/fuzz/corpus
[ "$seconds" -eq 0 ] || "$target" $options -max_total_time="$seconds" -print_final_stats=1 "$@" "$build/corpus" tests/fuzz/corpus
