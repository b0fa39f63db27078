#!/usr/bin/env bash
# An OCI image without a registry: Debian's C library and certificates, the program, its ONNX
# Runtime. Writes target/image/foretell-oci.tar (`podman load --input`). Needs root, mmdebstrap,
# buildah (Debian packages). FORETELL names the program, target/dist/foretell by default.
#
# deploy/Dockerfile makes the same image where base images can be pulled.
set -euo pipefail
cd "$(dirname "$0")/../.."
foretell=${FORETELL:-target/dist/foretell}
runtime=$(onnx/fetch.sh)
folder=target/image
mkdir -p "$folder"
name=foretell:$("$foretell" --version | cut -d' ' -f2)

mmdebstrap --quiet --variant=extract --include=libc6,libgcc-s1,libstdc++6,ca-certificates,netbase \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder/root.tar"

export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null' EXIT
buildah add --quiet "$container" "$folder/root.tar" /
buildah copy --quiet --chmod 0755 "$container" "$foretell" /usr/local/bin/foretell
buildah copy --quiet --chmod 0755 "$container" "$runtime" /usr/local/lib/
buildah copy --quiet "$container" LICENSE /usr/share/doc/foretell/LICENSE
buildah copy --quiet "$container" onnx/models /usr/local/share/foretell/models
buildah config --user 65532:65532 --port 8080 --port 9465 \
  --entrypoint '["/usr/local/bin/foretell"]' --cmd 'serve --config /etc/foretell/foretell.yaml' \
  --label org.opencontainers.image.title=foretell --label org.opencontainers.image.licenses=Apache-2.0 \
  --label "org.opencontainers.image.version=${name#*:}" "$container"
buildah commit --quiet "$container" "$name"
rm -f "$folder/foretell-oci.tar"
buildah push --quiet "$name" "oci-archive:$folder/foretell-oci.tar:$name"
echo "$folder/foretell-oci.tar ($name)"
