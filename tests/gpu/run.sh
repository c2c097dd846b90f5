#!/bin/sh
# Everything that needs a GPU, in one command; each part has its own limit, and the next one follows whatever came of it.
# PYTHON is a Python with a CUDA build of torch, with Lightning and with accelerate; what else it lacks is in .carried/
# (tests/gpu/carry.sh).
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src:$PWD:$PWD/.carried" PYTHONUNBUFFERED=1
# Several workers share the one GPU here, and talk to each other by way of this host.
export NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || { echo "tests/gpu need an NVIDIA GPU, and a torch that was built for it: there is none here."; exit 1; }
for wheel in .carried/*.whl; do
    test ! -e "$wheel" || { "$python" -m zipfile -e "$wheel" .carried && rm "$wheel"; }
done
# Nobody else's plugins: what they warn of would be an error.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
status=0
for part in ${*:-tests/gpu}; do
    echo "== $part"
    timeout "${LIMIT_S:-270}" "$python" -m pytest -q -p no:cacheprovider -p xdist.plugin -p pytest_timeout -n "${PARALLEL:-5}" --dist worksteal \
        -m 'not long' --durations=5 "$part" || status=1
done
exit $status
