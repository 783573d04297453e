#!/bin/sh
# A container listens on every address of its own network, which the server does only with keys. Without one it makes a
# key, keeps it in the state volume and says where: nothing is open by accident.
set -eu
if [ "${1:-serve}" = serve ] && [ -z "${TIDEMILL_API_KEY:-}" ] && [ -z "${TIDEMILL_API_KEY_FILE:-}" ]; then
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
