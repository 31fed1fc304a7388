#!/bin/sh
# Builds the native fuzz targets with the address and undefined-behaviour sanitizers, and prints the path of the program.
#
#   tests/fuzz/build.sh
#
# clang++ gives libFuzzer, which is guided by coverage. CXX names another compiler: the program then has its own driver.
# FUZZ_BUILD is the folder to build in, FUZZ_OPTIMIZE the level: 0 compiles six times as fast.
set -eu

cd "$(dirname "$0")/../.."
cxx=${CXX:-clang++}
command -v "$cxx" >/dev/null || cxx=g++
if ! command -v "$cxx" >/dev/null; then
    echo "error: the native fuzz targets need clang++ or g++ (found neither); install clang, or name one in CXX" >&2
    exit 1
fi
build=${FUZZ_BUILD:-build/fuzz}/$(basename "$cxx")
mkdir -p "$build"
target=$build/decode_fuzz

avx2="-mavx2 -mbmi -mbmi2 -mpopcnt"
case "$(uname -m)" in x86_64 | amd64) ;; *) avx2="" ;; esac

compile() {
    source=$1
    shift
    object=$build/$(basename "$source" .cpp).o
    objects="$objects $object"
    # What has not changed since is not compiled again: with sanitizers each file takes a while.
    if [ -f "$object" ] && [ -z "$(find "$source" native tests/fuzz -newer "$object" \
        \( -path "$source" -o -name '*.hpp' -o -name build.sh \))" ]; then
        return
    fi
    # shellcheck disable=SC2086
    "$cxx" -std=c++20 "-O${FUZZ_OPTIMIZE:-2}" -g -fno-strict-aliasing -fno-omit-frame-pointer -fsanitize=$sanitizers \
        -fno-sanitize-recover=all -Inative -Itests/fuzz "$@" -c "$source" -o "$object" &
    compilers="$compilers $!"
}

if [ ! -x "$target" ] || [ -n "$(find native tests/fuzz -newer "$target" \( -name '*.?pp' -o -name build.sh \))" ]; then
    link=address,undefined sanitizers=address,undefined driver=tests/fuzz/driver.cpp
    if echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
        "$cxx" -x c++ - -fsanitize=fuzzer,address,undefined -o "$build/probe" 2>/dev/null; then
        link=fuzzer,address,undefined sanitizers=fuzzer-no-link,address,undefined driver=
    elif ! echo 'int main() {}' | "$cxx" -x c++ - -fsanitize=$link -o "$build/probe" 2>"$build/probe.log"; then
        echo "error: '$cxx' cannot link its sanitizers; on Debian install libclang-rt-dev or libasan. It says:" >&2
        cat "$build/probe.log" >&2
        exit 1
    fi
    objects="" compilers=""
    for source in native/*.cpp tests/fuzz/decode_fuzz.cpp $driver; do
        case "$source" in
            */module.cpp) ;; # the binding to Python
            # shellcheck disable=SC2086
            */isa_avx2.cpp) compile "$source" $avx2 ;;
            *) compile "$source" ;;
        esac
    done
    # One at a time, because only then a failure ends this script.
    for compiler in $compilers; do wait "$compiler"; done
    rm -f "$build/libfuzzer"
    # shellcheck disable=SC2086
    "$cxx" -fsanitize=$link -fno-sanitize-recover=all $objects -o "$target"
    [ -n "$driver" ] || touch "$build/libfuzzer"
fi
echo "$target"
