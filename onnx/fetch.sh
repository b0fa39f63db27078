#!/bin/sh
# Fetches ONNX Runtime from its official PyPI wheel into a cache, once.
#
# Version and hash are pinned: one wheel per architecture (any CPython's wheel carries the same
# library, so one is picked whatever python runs this). Prints the library's path on standard
# output, everything else on standard error. Needs python3 with pip; nothing is installed.
#
#   FORETELL_CACHE  folder of the cache; .cache in the repository unless set
#   ORT_PACKAGE     onnxruntime unless set, or onnxruntime-gpu: with the CUDA provider, for x86_64
set -eu

version=1.31.1
package=${ORT_PACKAGE:-onnxruntime}
case "$package-$(uname -s)-$(uname -m)" in
    onnxruntime-Linux-x86_64) arch=x86_64 hash=1f3dea47f2f0e5117c2404cea7d21fd253ae7836a3bf167a501cdfbb2600d536 ;;
    onnxruntime-Linux-aarch64) arch=aarch64 hash=0b9a492176886992e0e875f06bc0367e333f5fff11711a2d642e18b02f3009cc ;;
    onnxruntime-gpu-Linux-x86_64) arch=x86_64 hash=05d548956197b9d01f59b625de740e0d6be3593f874e241a12dc0362650ecdf7 ;;
    *)
        echo "no pinned $package for $(uname -s) $(uname -m): set ORT_DYLIB_PATH to a library of 1.24 or later" >&2
        exit 1
        ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
cache=${FORETELL_CACHE:-$root/.cache}
library=$cache/$package-$version/lib/libonnxruntime.so.$version
if [ -f "$library" ]; then
    echo "$library"
    exit 0
fi

echo "fetching $package $version ($arch) with pip" >&2
mkdir -p "$cache"
work=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "$package==$version --hash=sha256:$hash" >"$work/requirements.txt"
python3 -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp --abi cp312 --platform "manylinux_2_28_$arch" \
    --dest "$work" --requirement "$work/requirements.txt" >&2

python3 - "$work" "$version" <<'PYTHON'
import pathlib, sys, zipfile

work, version = pathlib.Path(sys.argv[1]), sys.argv[2]
(wheel,) = work.glob("*.whl")
(work / "tree" / "lib").mkdir(parents=True)
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        base = name.rsplit("/", 1)[-1]
        if base.startswith("libonnxruntime") and ".so" in base:
            (work / "tree" / "lib" / base).write_bytes(archive.read(name))
        elif base in ("LICENSE", "ThirdPartyNotices.txt"):
            (work / "tree" / base).write_bytes(archive.read(name))
assert (work / "tree" / "lib" / f"libonnxruntime.so.{version}").is_file(), "the wheel has no library"
PYTHON

# One rename, so that concurrent or interrupted runs never leave an incomplete cache.
if ! mv -T "$work/tree" "$cache/$package-$version" 2>/dev/null && [ ! -f "$library" ]; then
    echo "cannot write $cache/$package-$version" >&2
    exit 1
fi
echo "$package $version is in $cache/$package-$version" >&2
echo "$library"
