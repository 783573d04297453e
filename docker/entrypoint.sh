#!/bin/sh
# A container listens on every address of its own network, which the server does only with keys. Without one it makes a
# key, keeps it in the state volume and says where: nothing is open by accident. Servers that share a database get their
# keys from there (`tidemill keys`).
set -eu
given=${TIDEMILL_API_KEY:-}${TIDEMILL_API_KEY_FILE:-}
case ${TIDEMILL_STATE_DIR:-} in postgres*) given=database ;; esac
if [ "${1:-serve}" = serve ] && [ -z "$given" ]; then
    file=/var/lib/tidemill/api-key
    if [ ! -s "$file" ]; then
        umask 077
        python -P -c 'import secrets; print(secrets.token_urlsafe(32))' > "$file"
    fi
    TIDEMILL_API_KEY=$(cat "$file")
    export TIDEMILL_API_KEY
    echo "tidemill: no key was given; clients send the one in $file (docker exec CONTAINER cat $file)"
fi
exec tidemill "$@"
