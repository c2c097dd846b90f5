#!/bin/sh
# Puts what CRAFT and its tests need beside torch into .carried/, for a machine on which nothing can be installed.
# There: tests/gpu/run.sh. Arguments: that machine's Python, and what it lacks.
set -e
cd "$(dirname "$0")/../.."
version=${1:-3.12}
rm -rf .carried && mkdir .carried
.venv/bin/pip install --quiet --disable-pip-version-check --target .carried --python-version "$version" \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 --only-binary=:all: \
    ${2:-msgspec blake3 nvidia-ml-py}
find .carried -name '__pycache__' -prune -exec rm -rf {} +
du -sh .carried
