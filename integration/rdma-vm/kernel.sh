#!/usr/bin/env bash
# Prints the folder of a Debian 6.12 kernel, with the modules that the virtual machine loads, in order; fetches it once.
#
#   kernel.sh
#
# Environment: CSI_WARDEN_CACHE. In the folder: vmlinuz, and modules/NN-NAME.ko.
set -euo pipefail
modules=(dummy crc32_generic rdma_rxe rdma_ucm ib_umad nvme)
cache=${CSI_WARDEN_CACHE:-$HOME/.cache/csi-warden}

# On Debian 12 the 6.12 kernels have a name of their own, on Debian 13 they are the usual ones.
newest() { apt-cache depends linux-image-6.12-amd64 linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-6\.12/ {print $2; exit}' || true; }
cached() { find "$cache" -maxdepth 2 -path '*/linux-image-6.12*/vmlinuz' -printf '%h\n' 2>/dev/null | sort -V | tail -1 || true; }

# One that was fetched before is good enough, whatever is newer.
folder=$(cached)
if [ -n "$folder" ]; then
  echo "$folder"
  exit
fi
package=$(newest)
if [ -z "$package" ]; then
  apt-get update -qq
  package=$(newest)
fi
[ -n "$package" ] || { echo "apt knows no linux-image-6.12 for amd64; this takes Debian 12 with its security updates, or later" >&2; exit 1; }

echo "fetching $package into $cache, once" >&2
mkdir -p "$cache"
work=$(mktemp -d "$cache/.fetching.XXXX")
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -q "$package" >/dev/null 2>&1) || { echo "cannot download $package" >&2; exit 1; }
dpkg-deb -x "$work"/*.deb "$work/whole"
version=$(ls "$work/whole/lib/modules")
depmod -b "$work/whole" "$version"
mkdir -p "$work/new/modules"
number=0
for module in "${modules[@]}"; do modprobe -d "$work/whole" -S "$version" --show-depends "$module"; done |
  awk '/^insmod/ && !seen[$2]++ {print $2}' | while read -r file; do
    number=$((number + 1))
    name=$(basename "$file" .xz)
    case $file in
      *.xz) xz -dc "$file" ;;
      *) cat "$file" ;;
    esac > "$work/new/modules/$(printf %02d $number)-$name"
  done
cp "$work/whole/boot/vmlinuz-$version" "$work/new/vmlinuz"
rm -rf "${cache:?}/$package"
mv "$work/new" "$cache/$package"
echo "$cache/$package"
