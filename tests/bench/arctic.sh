#!/usr/bin/env bash
# Builds the suffix decoding part of Arctic Inference into the cache, once, from its sdist on PyPI
# (Apache-2.0): two C++ files and three Python ones. Under a minute. Prints the folder for
# PYTHONPATH on standard output, everything else on standard error.
#
# Known dead ends:
#  * `pip install arctic-inference`: there are no wheels, and the build asks for torch, cmake,
#    nanobind 2.9.2, protobuf and grpcio-tools, which its setup.py needs even for the metadata.
#  * `pip download` runs setup.py for the metadata as well, so it is done by a Python that has
#    torch, without build isolation.
#  * Only csrc/suffix_decoding is compiled, by its own CMakeLists.txt; the package's __init__.py
#    imports nothing.
#
#   PYTHON          a python with torch, for which it is built; that of tests/engines/vllm.sh unless
#                   set
#   FORETELL_CACHE  folder of the cache; .cache in the repository unless set
set -euo pipefail
version=0.3.0
root=$(cd "$(dirname "$0")/../.." && pwd)
cache=${FORETELL_CACHE:-$root/.cache}
python=${PYTHON:-$cache/engines/vllm-0.32.0/bin/python}
home=$cache/engines/arctic-$version
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
built=$home/site/arctic_inference/suffix_decoding/_C$suffix
if [ -f "$built" ]; then
  echo "$home/site"
  exit 0
fi

command -v c++ >/dev/null || { echo "Arctic Inference is built with c++, which is not here (Debian package g++)" >&2; exit 1; }
mkdir -p "$home"
home=$(cd "$home" && pwd)
pip=("$python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install --no-deps --upgrade --target "$home/tools" cmake==4.4.4 nanobind==2.9.2 >&2
sdist=$home/arctic_inference-$version.tar.gz
if [ ! -f "$sdist" ]; then
  "${pip[@]}" download --no-deps --no-build-isolation --no-binary :all: --dest "$home" "arctic-inference==$version" >&2
fi
rm -rf "$home/source" "$home/site" && mkdir "$home/source"
tar -xzf "$sdist" -C "$home/source" --strip-components=1
export PYTHONPATH=$home/tools
"$home/tools/bin/cmake" -S "$home/source/csrc/suffix_decoding" -B "$home/build" -DPython_EXECUTABLE="$python" \
  -DCMAKE_BUILD_TYPE=Release >&2
"$home/tools/bin/cmake" --build "$home/build" --parallel 2 >&2
package=$home/site/arctic_inference
mkdir -p "$package/suffix_decoding"
cp "$home/source/arctic_inference/__init__.py" "$package/"
cp "$home/source/arctic_inference/suffix_decoding/"{__init__,cache}.py "$package/suffix_decoding/"
cp "$home/build/_C$suffix" "$package/suffix_decoding/"
echo "$home/site"
