#!/bin/bash
# Puts known faults back, one at a time (tests/mutants/NAME.patch, whose first line names the test that must catch it), in a
# copy of the tree, and expects that test to fail. Exit 1 if a fault goes unnoticed. About half a minute each. Arguments:
# names of faults, default all.
set -u
cd "$(dirname "$0")/.." || exit 1
source=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -c --exclude=./build --exclude=./.git --exclude=./out --exclude=./data/text --exclude='./data/*_*_0*.bin' . | tar -x -C "$work"
cd "$work" || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
caught=0 missed=0

build() { make -s CUDA=0 tests V=1 >"$work/log" 2>&1 || { tail -5 "$work/log"; return 1; }; }
build || { echo "the unchanged tree does not build"; exit 1; }
[ $# -gt 0 ] || set -- $(basename -s .patch "$source"/tests/mutants/*.patch)
for name in "$@"; do
    patch=$source/tests/mutants/$name.patch
    [ -e "$patch" ] || { echo "no fault is called $name"; missed=$((missed + 1)); continue; }
    test=$(sed -n '1s/^Caught by: //p' "$patch")
    patch -sp1 <"$patch" || { echo "STALE   $name: the patch no longer applies"; missed=$((missed + 1)); continue; }
    if ! build; then
        echo "STALE   $name: does not build"
        missed=$((missed + 1))
    elif timeout 180 tests/run.sh "$test" >"$work/log" 2>&1; then
        echo "MISSED  $name by $test"
        missed=$((missed + 1))
    else
        echo "caught  $name by $test"
        caught=$((caught + 1))
    fi
    patch -sRp1 <"$patch"
done
echo "mutants: $caught caught, $missed missed"
[ $missed = 0 ]
