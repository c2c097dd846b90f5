#!/bin/sh
# Puts what CRAFT and its tests need beside torch into .carried/, for a machine on which nothing can be installed.
# There: tests/gpu/run.sh. Arguments: that machine's Python, what it lacks, and what it has in too old a version. Of the latter only
# the wheels, as they are: unpacked, transformers is larger than all else together.
set -e
cd "$(dirname "$0")/../.."
version=${1:-3.12}
known=$(.venv/bin/python -c 'import importlib.metadata; print(importlib.metadata.version("transformers"))')
rm -rf .carried && mkdir .carried
pip() {
    command=$1
    shift
    .venv/bin/pip "$command" --quiet --disable-pip-version-check --python-version "$version" --only-binary=:all: \
        --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 "$@"
}
pip install --target .carried ${2:-msgspec blake3 nvidia-ml-py}
pip download --no-deps --dest .carried ${3:-"transformers==$known"}
find .carried -name '__pycache__' -prune -exec rm -rf {} +
du -sh .carried
