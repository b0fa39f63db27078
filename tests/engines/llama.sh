#!/usr/bin/env bash
# Builds llama-server into the cache, once, from the sdist of llama-cpp-python, which contains all
# of llama.cpp. Version and hash are pinned; cmake and ninja come from PyPI. About 5 minutes on two
# cores. Prints the server's path on standard output, everything else on standard error.
#
# It is built for the local processor (GGML_NATIVE). On a machine that lacks instructions of the
# build machine the cache is built again: the old binary would end with an illegal instruction.
#
#   FORETELL_CACHE  folder of the cache; .cache in the repository unless set
set -euo pipefail
version=0.3.36
root=$(cd "$(dirname "$0")/../.." && pwd)
home=${FORETELL_CACHE:-$root/.cache}/engines/llama-$version
server=$home/bin/llama-server
instructions() { grep -m1 '^flags' /proc/cpuinfo | tr ' ' '\n' | grep -E '^(sse|avx|fma|f16c|bmi)' | LC_ALL=C sort || true; }
if [ -x "$server" ] && [ -f "$home/bin/instructions" ] && [ -z "$(instructions | LC_ALL=C comm -13 - "$home/bin/instructions")" ]; then
  echo "$server"
  exit 0
fi

for tool in cc c++; do
  command -v $tool >/dev/null || { echo "llama.cpp is built with $tool, which is not here (Debian package g++)" >&2; exit 1; }
done
echo "building llama-server out of llama-cpp-python $version (about 5 minutes on two cores)" >&2
mkdir -p "$home"
python3 -m venv "$home/tools" >&2
pip=("$home/tools/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install cmake==4.1.2 ninja==1.13.0 >&2
sdist=$(find "$home" -maxdepth 1 -name 'llama_cpp_python-*.tar.gz')
if [ -z "$sdist" ]; then
  "${pip[@]}" download --no-deps --no-binary llama-cpp-python \
    --dest "$home" "llama-cpp-python==$version" >&2
  sdist=$home/llama_cpp_python-$version.tar.gz
fi
rm -rf "$home/source" && mkdir "$home/source"
tar -xzf "$sdist" -C "$home/source" --strip-components=1
PATH="$home/tools/bin:$PATH" cmake -S "$home/source/vendor/llama.cpp" -B "$home/build" -G Ninja \
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_ALL_WARNINGS=OFF -DGGML_ALL_WARNINGS=OFF \
  -DCMAKE_PROJECT_INCLUDE="$root/tests/engines/llama.cmake" >&2
PATH="$home/tools/bin:$PATH" cmake --build "$home/build" --target llama-server >&2
mkdir -p "$home/bin"
cp "$home/build/bin/llama-server" "$server.new"
instructions > "$home/bin/instructions"
mv "$server.new" "$server"
rm -rf "$home/build" "$home/source/vendor/llama.cpp/.git"
echo "$server"
