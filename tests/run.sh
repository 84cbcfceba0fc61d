#!/bin/bash
# Runs every test program in $BUILD/tests and every tests/test_*.sh, with the include rules first; closes with
# "N passed, N failed". A failing test's output is shown whole. Arguments: names of tests, default all. LIMIT_S, if set, is
# how long one may take.
# test_cuda_* of $BUILD use a GPU where there is one; those of $EMULATED, a build folder, run on the CPU.
set -u
[ -z "$(trap -p INT)" ] || exec env --default-signal=INT "$0" "$@" # a shell's background: Ctrl-C would be ignored
cd "$(dirname "$0")/.." || exit 1
export BUILD=${BUILD:-build} MPI=${MPI:-1} TRAIN=${TRAIN:-./train} EMULATED=${EMULATED:-}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
[[ $TRAIN == */* ]] || TRAIN=./$TRAIN
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=0

run() {
    local name=$1 start=$SECONDS
    shift
    if ${LIMIT_S:+timeout "$LIMIT_S"} "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
        printf 'ok    %-28s %3d s  %s\n' "$name" $((SECONDS - start)) "$(grep -aoE '[0-9]+ test\(s\) run|skipped: .*' "$log" | tail -1)"
    else
        failed=$((failed + 1))
        printf 'FAIL  %-28s %3d s\n' "$name" $((SECONDS - start))
        sed 's/^/      /' "$log"
    fi
}

wanted() { [ $# = 1 ] || [[ " ${*:2} " == *" $1 "* ]]; }
wanted lint "$@" && run lint tests/lint.sh
export CUDART_DEVICES=0 # the emulated GPU is for its own tests
for source in tests/test_*.c; do
    name=$(basename "$source" .c)
    [[ $name == test_cuda_* ]] && devices=1 || devices=0
    [ $devices = 1 ] && [ "$EMULATED" = "$BUILD" ] && continue
    wanted "$name" "$@" && [ -x "$BUILD/tests/$name" ] && CUDART_DEVICES=$devices run "$name" "$BUILD/tests/$name"
done
for script in tests/test_*.sh; do
    name=$(basename "$script")
    [[ $name == test_cuda_* ]] && continue
    wanted "$name" "$@" && [ -x "$script" ] && run "$name" "$script"
done
for test in tests/test_cuda_*; do
    name=$(basename "$test" .c)
    program=$EMULATED/tests/$name
    [ -x "$test" ] && program=$test
    wanted "$name" "$@" && [ "$EMULATED" ] || continue
    if [ "$EMULATED" = none ]; then
        run "$name, emulated" echo 'skipped: no CUDA headers'
    else
        [ "$EMULATED" = "$BUILD" ] || TRAIN=./$EMULATED/train
        CUDART_DEVICES=1 BUILD=$EMULATED run "$name, emulated" "$program"
    fi
done
for name in "$@"; do
    [ "$name" = lint ] || [ -e "tests/$name" ] || [ -e "tests/$name.c" ] || { echo "no test is called $name"; failed=$((failed + 1)); }
done
printf '%d passed, %d failed\n' $passed $failed
[ $failed = 0 ] && [ $passed -gt 0 ]
