#!/usr/bin/env bash
# Fetches the dependencies of these tests into a folder, once: Python packages from PyPI, and from
# Debian's archive prometheus and promtool, which are unpacked and not installed.
#
#   fetch.sh FOLDER        python/ is for PYTHONPATH, bin/ for PATH
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
stamp=$folder/.done-$(cat "$here"/fetch.sh "$here"/requirements*.txt | sha256sum | cut -c1-16)
[ ! -f "$stamp" ] || exit 0

rm -rf "${folder:?}"/{python,bin,debian}
mkdir -p "$folder/bin" "$folder/debian"
lists=("$here"/requirements*.txt)
"${PYTHON:-python3}" -m pip --quiet --disable-pip-version-check install --no-warn-conflicts --root-user-action=ignore \
  --target "$folder/python" "${lists[@]/#/--requirement=}"

cd "$folder/debian"
download() { apt-get --quiet=2 -o APT::Sandbox::User=root download prometheus; }
download || { apt-get --quiet=2 update && download; }
dpkg-deb --extract prometheus_*.deb .
rm prometheus_*.deb
ln -s ../debian/usr/bin/{prometheus,promtool} "$folder/bin/"
touch "$stamp"
