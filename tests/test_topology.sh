#!/bin/bash
# comm.group = numa on machines that hwloc makes up: the header's domains, and ranks bound to two of them. Called by
# `make test` with BUILD, TRAIN and MPI set.
. "$(dirname "$0")/script.sh"
tiny model.context=16 train.seq_len=16 train.batch=1 train.steps=2 train.val_every=0 train.sample_every=0 \
    train.save_every=0 run.device=replay run.out="$work/out" replay.forward_ms=1 replay.backward_ms=1

# says FACT TEXT WHAT: the header's line
says() { grep -qE "^ *$1 .*$2" "$work/log" || fail "$3: expected '$2'" "$work/log"; }

# machine SYNTHETIC ARGS...: one process on it
machine() {
    local machine=$1
    shift
    HWLOC_SYNTHETIC=$machine timeout 60 "$TRAIN" "$work/t.cfg" "$@" >"$work/log" 2>&1 ||
        fail "$machine $*: exit $?" "$work/log"
}
machine 'numa:2 core:2 pu:1'
says machine ', 4 cores, 2 NUMA domains$' 'two domains'
grep -q '^  speed ' "$work/log" && ! grep -qE '^  compute |loss' "$work/log" ||
    fail 'a replay has no loss or FLOP/s' "$work/log"
[ "$(grep -c '"loss":null,.*"grad_norm":null,' "$work/out/log.jsonl")" = 2 ] || fail 'a replay logs a loss' "$work/out/log.jsonl"
machine 'numa:1 core:3 pu:2' comm.group=numa loop.ranks=2
says machine ', 6 cores, 1 NUMA domain$' 'one domain'
says ranks '2 on 1 NUMA domain over loop' 'threads share their binding'
machine 'numa:1 core:4 pu:1' loop.ranks=4 comm.ranks_per_node=1 run.threads=0
says ranks '4 on 4 nodes over loop, 1 thread each' 'invented nodes have no cores of their own'
machine 'numa:1 core:1 pu:1' train.steps=1
says machine ', 1 core, 1 NUMA domain$' 'one core'
says batch ' 1 rank x 1 micro-step x 1 sequence x 16 tokens$' 'one sequence'
says 1 'step in ' 'one step'

# bound GROUP: four processes, two on each of two domains of a core
bound() {
    # shellcheck disable=SC2016
    timeout 60 mpirun --oversubscribe --bind-to none -n 4 sh -c '
        HWLOC_SYNTHETIC="numa:2 core:1 pu:1" HWLOC_THISSYSTEM=1 \
        exec taskset -c $((OMPI_COMM_WORLD_RANK / 2)) "$@"' sh "$TRAIN" "$work/t.cfg" "comm.group=$1" \
        >"$work/log" 2>&1 || fail "group=$1: exit $?" "$work/log"
}
if [ "$MPI" = 0 ]; then
    echo "skipped under mpirun: built without MPI"
elif ! taskset -c 0 true 2>/dev/null || ! taskset -c 1 true 2>/dev/null; then
    echo "skipped under mpirun: needs cores 0 and 1"
else
    bound numa
    says ranks '4 on 2 NUMA domains over mpi' 'bound to two domains'
    says sync 'hierarchical' 'bound to two domains'
    bound node
    says ranks '4 on 1 node over mpi' 'domains of one node'
fi

finish
