#!/bin/bash
# comm.group = numa on machines that hwloc makes up: the header's domains, and ranks bound to two of them. Called by
# `make test` with BUILD, TRAIN and MPI set.
set -u
cd "$(dirname "$0")/.." || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
BUILD=${BUILD:-build} TRAIN=${TRAIN:-./train} MPI=${MPI:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
fail() { echo "test_topology.sh: $*"; sed 's/^/    /' "$work/log"; failures=$((failures + 1)); }

"$BUILD/prepare" --tokenizer bytes --out "$work" --val 0 t tests/data/emma.txt >/dev/null || exit 1
printf '%s\n' '[model]' 'layers = 2' 'heads = 2' 'channels = 32' 'context = 16' 'vocab = 257' '[data]' \
    "train = $work/t_train_*.bin" 'tokenizer = bytes' '[train]' 'seq_len = 16' 'batch = 1' 'steps = 2' 'val_every = 0' \
    'sample_every = 0' 'save_every = 0' '[run]' 'device = replay' "out = $work/out" '[comm]' 'calibrate = no' \
    '[replay]' 'forward_ms = 1' 'backward_ms = 1' >"$work/t.cfg"

# says FACT TEXT WHAT: the header's line
says() { grep -qE "^ *$1 .*$2" "$work/log" || fail "$3: expected '$2'"; }

# machine SYNTHETIC ARGS...: one process on it
machine() {
    local machine=$1
    shift
    HWLOC_SYNTHETIC=$machine timeout 60 "$TRAIN" "$work/t.cfg" "$@" >"$work/log" 2>&1 || fail "$machine $*: exit $?"
}
machine 'numa:2 core:2 pu:1'
says machine ', 4 cores, 2 NUMA domains$' 'two domains'
machine 'numa:1 core:3 pu:2' comm.group=numa loop.ranks=2
says machine ', 6 cores, 1 NUMA domain$' 'one domain'
says ranks '2 on 1 NUMA domain over loop' 'threads share their binding'

# bound GROUP: four processes, two on each of two domains of a core
bound() {
    # shellcheck disable=SC2016
    timeout 60 mpirun --oversubscribe --bind-to none -n 4 sh -c '
        HWLOC_SYNTHETIC="numa:2 core:1 pu:1" HWLOC_THISSYSTEM=1 \
        exec taskset -c $((OMPI_COMM_WORLD_RANK / 2)) "$@"' sh "$TRAIN" "$work/t.cfg" "comm.group=$1" \
        >"$work/log" 2>&1 || fail "group=$1: exit $?"
}
if [ "$MPI" = 0 ]; then
    echo "test_topology.sh: skipped under mpirun: built without MPI"
elif ! taskset -c 0 true 2>/dev/null || ! taskset -c 1 true 2>/dev/null; then
    echo "test_topology.sh: skipped under mpirun: needs cores 0 and 1"
else
    bound numa
    says ranks '4 on 2 NUMA domains over mpi' 'bound to two domains'
    says sync 'hierarchical' 'bound to two domains'
    bound node
    says ranks '4 on 1 node over mpi' 'domains of one node'
fi

[ $failures = 0 ] && echo "test_topology.sh: passed"
exit $((failures > 0))
