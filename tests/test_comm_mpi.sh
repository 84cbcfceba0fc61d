#!/bin/sh
# comm under mpirun: the cases of test_comm_mpi on 1 to 4 processes, then everything that may go wrong.
# Called by `make test` with BUILD and MPI set.
set -u
program=${BUILD:-build}/tests/test_comm_mpi
if [ "${MPI:-1}" = 0 ]; then
    echo "test_comm_mpi.sh: skipped: built without MPI"
    exit 0
fi
[ -x "$program" ] || { echo "test_comm_mpi.sh: $program is missing"; exit 1; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # Open MPI refuses root without them
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

fail() {
    echo "test_comm_mpi.sh: $1"
    sed 's/^/    /' "$folder/output"
    failures=$((failures + 1))
}

# start RANKS ARGUMENTS...: runs them, at most a minute; sets code
start() {
    ranks=$1
    shift
    timeout 60 mpirun --oversubscribe -n "$ranks" "$program" "$@" >"$folder/output" 2>&1
    code=$?
}

# expect CODE LINE WHAT: that exit code, and the program's only line
expect() {
    [ "$code" = "$1" ] || fail "$3: exit code $code, expected $1"
    [ "$(grep -c '^test_comm_mpi: ' "$folder/output")" = 1 ] || fail "$3: expected one line of the program"
    grep -qx "test_comm_mpi: $2" "$folder/output" || fail "$3: expected the line '$2'"
}

for ranks in 1 2 3 4; do
    start "$ranks" cases
    [ "$code" = 0 ] && grep -qx "$ranks ranks on mpi: all cases passed" "$folder/output" || fail "cases on $ranks ranks"
done

start 3 config 1
expect 2 'rank 1: x.cfg:3: comm.ranks: no such key' 'one rank cannot read its config'
start 2 loop
expect 2 'comm.transport = loop: .*2 processes were started' 'threads asked for under mpirun'
SLURM_STEP_NUM_TASKS=4 "$program" cases >"$folder/output" 2>&1
code=$?
expect 2 'srun started 4 of this program, each of them alone: srun --mpi=pmix .*' 'srun without MPI'
SLURM_STEP_NUM_TASKS=4 "$program" loop >"$folder/output" 2>&1 || fail 'srun without MPI, as asked for'
SLURM_STEP_NUM_TASKS=2 start 2 cases # mpirun under Slurm starts its daemons by srun
[ "$code" = 0 ] || fail "mpirun under Slurm: exit code $code"
start 3 agree 2
expect 2 'rank 2: shard.bin: token 50257 at 12' 'agreed bad input'
start 3 fail 2
expect 1 'rank 2: disk full' 'one rank fails'
start 2 sizes 0
expect 1 'rank 1: rank 0 sent 200000 bytes where rank 1 expected 300000' 'sizes differ'
start 4 stuck 2
expect 1 'rank 0: no answer from rank 2 for 1 s (comm.timeout_s)' 'one rank is stuck'
start 4 stuck_mpi 3
expect 1 'rank 0: no answer from rank 3 for 1 s (comm.timeout_s)' "one rank is stuck, the others in MPI's all-reduce"

# kill -9 in the middle of an all-reduce: nobody stays behind
mpirun --oversubscribe -n 3 "$program" forever "$folder" >"$folder/output" 2>&1 &
launcher=$!
tries=0
while [ "$(cat "$folder"/?.pid 2>/dev/null | wc -l)" != 3 ] && [ $tries -lt 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
if [ -s "$folder/1.pid" ]; then kill -9 "$(cat "$folder/1.pid")"; else kill $launcher; fi
wait $launcher
code=$?
[ "$code" != 0 ] || fail "a killed rank: exit code 0"
expect "$code" 'rank 1 (process [0-9]* on .*) ended unexpectedly; the run stops' 'a killed rank'
alive() { grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2>/dev/null; } # not a zombie
for rank in 0 2; do
    tries=0 # they are gone already, but may take a moment to leave the process table
    while alive "$(cat "$folder/$rank.pid")" && [ $tries -lt 100 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    [ $tries -lt 100 ] || fail "rank $rank lives on after rank 1 was killed"
done

[ $failures = 0 ] && echo "test_comm_mpi.sh: passed"
exit $failures
