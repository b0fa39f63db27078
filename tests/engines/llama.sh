#!/usr/bin/env bash
# Builds llama-server into the cache, once, from the sdist of llama-cpp-python, which carries the whole of
# llama.cpp. Version and hash are pinned; cmake and ninja come from PyPI. About 15 minutes on two cores.
# Prints the server's path on standard output, everything else on standard error.
#
#   FORETELL_CACHE  where the cache lies; .cache in the repository unless set
set -euo pipefail
version=0.3.36
root=$(cd "$(dirname "$0")/../.." && pwd)
home=${FORETELL_CACHE:-$root/.cache}/engines/llama-$version
server=$home/bin/llama-server
if [ -x "$server" ]; then
  echo "$server"
  exit 0
fi

echo "building llama-server out of llama-cpp-python $version (about 15 minutes on two cores)" >&2
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
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >&2
PATH="$home/tools/bin:$PATH" cmake --build "$home/build" --target llama-server >&2
mkdir -p "$home/bin"
cp "$home/build/bin/llama-server" "$server.new"
mv "$server.new" "$server"
rm -rf "$home/build" "$home/source/vendor/llama.cpp/.git"
echo "$server"
