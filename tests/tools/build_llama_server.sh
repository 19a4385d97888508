#!/bin/bash
# Builds the real llama-server (llama.cpp) from the llama-cpp-python sdist, once per machine.
#
#   build_llama_server.sh
#
# Leaves ${HIVE_CI_CACHE:-/var/cache/hive-ci}/llama/llama-server (12 MB) and prints its path. Does nothing where one
# is there and runs. Takes about 4 minutes on 2 cores. Needs cmake, ninja-build, g++, python3 with pip.
set -euo pipefail
VERSION=0.3.36
DIR=${HIVE_CI_CACHE:-/var/cache/hive-ci}/llama

mkdir -p "$DIR"
exec 9>"$DIR/.lock"
flock 9 # two runs at once: the second finds what the first has built
if "$DIR/llama-server" --version >/dev/null 2>&1; then
    echo "$DIR/llama-server"
    exit 0
fi
for tool in cmake ninja g++; do
    command -v "$tool" >/dev/null || {
        echo "build_llama_server.sh: $tool is missing: apt-get install -y cmake ninja-build g++" >&2
        exit 5
    }
done

echo "building llama-server $VERSION in $DIR, about 4 minutes" >&2
SOURCE=$DIR/llama_cpp_python-$VERSION
if [ ! -d "$SOURCE" ]; then
    python3 -m pip download -q --no-deps --no-binary :all: -d "$DIR" "llama-cpp-python==$VERSION" >&2
    tar -xzf "$SOURCE.tar.gz" -C "$DIR"
fi
# No web UI, no TLS, no code for this very CPU: the cache may move to another x86-64-v3 machine.
cmake -G Ninja -S "$SOURCE/vendor/llama.cpp" -B "$DIR/build" \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF >&2
cmake --build "$DIR/build" --target llama-server -j "$(nproc)" >&2
strip -o "$DIR/llama-server.new" "$DIR/build/bin/llama-server"
mv "$DIR/llama-server.new" "$DIR/llama-server"
"$DIR/llama-server" --version >&2
echo "$DIR/llama-server"
