#!/bin/bash
# Puts known faults back, one at a time, and expects a test to catch each: exit 1 if one goes unnoticed.
#
#     tests/mutants.sh [FAULT | TEST ...]     names of faults, or of tests for all that they must catch; default all
#
# A fault is tests/mutants/FAULT.patch; its first lines name the test and, where `make test CUDA=0` does not do, how
# that is made:
#
#   Caught by: test_cuda_gpu
#   Make: test CUDA=emulate
#
# The tree as it is is kept in build/mutants, once for each way to make it, so that a fault costs what it makes make
# build anew, and its test. That test must pass there first.
set -u
cd "$(dirname "$0")/.." || exit 1
[ "${1-}" != --help ] || { sed -n '2,/^set/s/^# \{0,1\}//p' tests/mutants.sh; exit 0; }
make=${MAKE:-make} room=$PWD/${BUILD:-build}/mutants start=$SECONDS
unset BUILD TRAIN TEST CUDA MAKE MAKEFLAGS MFLAGS MAKELEVEL # of a make that runs this
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 CCACHE_NOHASHDIR=1
[ -d /usr/lib/ccache ] && PATH=/usr/lib/ccache:$PATH

# header NAME WORD: what the fault's patch says behind "WORD: "
header() { sed -n "/^---/q;s/^$2: //p" "tests/mutants/$1.patch"; }
made() { local how=$(header "$1" Make); echo "${how:-test CUDA=0}"; }
tree() { echo "$room/tree_${1//[^a-zA-Z0-9]/_}"; }

# outcome FOLDER HOW TEST: passed, failed, or nothing if it does not build
outcome() {
    (cd "$1" && LIMIT_S=300 $make -s -j"$(nproc)" $2 TEST="$3") >"$room/log" 2>&1
    sed -n 's/^1 passed, 0 failed$/passed/p;s/^0 passed, 1 failed$/failed/p' "$room/log"
}

# The sources as they are now; what was built from them stays.
refresh() {
    mkdir -p "$1"
    find "$1" -mindepth 1 -maxdepth 1 ! -name build ! -name train -exec rm -rf {} +
    tar -c --exclude='./build*' --exclude=./.git --exclude=./out --exclude=./data/text --exclude='./data/*_*_0*.bin' \
        --exclude=./train . | tar -x -C "$1"
}

declare -A known # what came of trees and of tests without a fault
# try NAME: puts the fault back; $line says what came of it
try() {
    local patch=$PWD/tests/mutants/$1.patch test=$(header "$1" 'Caught by') how=$(made "$1")
    local tree=$(tree "$how")
    [ "${known[$how]:-}" ] || { refresh "$tree"; known[$how]=here; }
    [ "${known[$how $test]:-}" ] || known[$how $test]=$(outcome "$tree" "$how" "$test")
    line="BROKEN  $1: $test does not pass without it"
    [ "${known[$how $test]}" = passed ] || return
    rm -rf "$room/fault"
    cp -a "$tree" "$room/fault"
    line="STALE   $1: the patch no longer applies"
    patch -sfp1 -d "$room/fault" <"$patch" >/dev/null || return
    case $(outcome "$room/fault" "$how" "$test") in
    passed) line="MISSED  $1 by $test" ;;
    failed) line="caught  $1 by $test" ;;
    *) line="STALE   $1: does not build" ;;
    esac
}

$make -s CUDA=emulate help >/dev/null 2>&1 || without=test_cuda
faults=() new=() left_out=0 unknown=" $* "
for patch in tests/mutants/*.patch; do
    name=$(basename -s .patch "$patch") test=$(header "$name" 'Caught by')
    [ $# = 0 ] || [[ " $* " == *" $name "* || " $* " == *" $test "* ]] || continue
    unknown=${unknown// $name / } unknown=${unknown// $test / }
    [[ ${without:-} && $test == test_cuda* ]] && left_out=$((left_out + 1)) && continue
    faults+=("$name")
    [ -d "$(tree "$(made "$name")")" ] || new+=("$(tree "$(made "$name")")")
done
[[ $unknown =~ [^\ ] ]] && { echo "mutants: no fault and no test of one is called$unknown" >&2; exit 2; }
mkdir -p "$room" || exit 1
new=$(printf '%s\n' "${new[@]}" | sort -u | grep -c .)
echo "mutants: ${#faults[@]} faults, one at a time; about $(((${#faults[@]} * 12 + new * 120) / 60 + 1)) minutes"
[ $left_out = 0 ] || echo "left out, for want of CUDA's headers: $left_out"

caught=0 tried=0
for name in "${faults[@]}"; do
    try "$name"
    [[ $line == caught* ]] && caught=$((caught + 1))
    tried=$((tried + 1))
    left=$(((SECONDS - start) * (${#faults[@]} - tried) / tried))
    printf '%3d/%d, %2d:%02d min left  %s\n' $tried ${#faults[@]} $((left / 60)) $((left % 60)) "$line"
done
rm -rf "$room/fault"
echo "mutants: $caught caught, $((${#faults[@]} - caught)) missed"
[ $caught = ${#faults[@]} ]
