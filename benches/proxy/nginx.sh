#!/bin/sh
# Runs nginx before $DRIVER at $PROXY, with its files in $FOLDER. Also good for `integration/proxy/run --through`.
set -eu
here=$(dirname "$(realpath "$0")")
sed "s#FOLDER#$FOLDER#; s#PROXY#$PROXY#; s#DRIVER#$DRIVER#" "$here/nginx.conf" >"$FOLDER/nginx.conf"
exec nginx -c "$FOLDER/nginx.conf" -e "$FOLDER/nginx.log" -p "$FOLDER"
