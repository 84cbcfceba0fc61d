#!/bin/bash
# comm under mpirun: the cases of test_comm_mpi on 1 to 4 processes, then everything that may go wrong.
# Called by `make test` with BUILD and MPI set.
. "$(dirname "$0")/script.sh"
. tests/mpi_cases.sh

# expect CODE LINE WHAT: that exit code, and the program's only line
expect() {
    [ "$code" = "$1" ] && [ "$(grep -c '^test_comm_mpi: ' "$work/output")" = 1 ] &&
        grep -qx "test_comm_mpi: $2" "$work/output" ||
        fail "$3: exit code $code, expected $1 and the line '$2'" "$work/output"
}

every_case
for tries in 1 2 3; do
    start 2 wait
    [ "$code" = 0 ] && break
done
[ "$code" = 0 ] || fail "one waits for the other in MPI's all-reduce" "$work/output"
start 3 config 1
expect 2 'rank 1: x.cfg:3: comm.ranks: no such key' 'one rank cannot read its config'
start 2 loop
expect 2 'comm.transport = loop: .*2 processes were started' 'threads asked for under mpirun'
SLURM_STEP_NUM_TASKS=4 "$program" cases >"$work/output" 2>&1
code=$?
expect 2 'srun started 4 of this program, each of them alone: srun --mpi=pmix .*' 'srun without MPI'
SLURM_STEP_NUM_TASKS=4 "$program" loop >"$work/output" 2>&1 || fail 'srun without MPI, as asked for'
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
killed 3 forever
expect "$code" 'rank 1 (process [0-9]* on .*) ended unexpectedly; the run stops' 'a killed rank'

# A rank is stopped before MPI has started; the alarm comes early.
rm -f "$work"/?.pid
mpirun --oversubscribe -n 1 sh -c "echo \$\$ >'$work/0.pid'; exec $program cases" \
    : -n 1 sh -c "echo \$\$ >'$work/1.pid'; kill -STOP \$\$; exec $program cases" >"$work/output" 2>&1 &
launcher=$!
sleep 1
kill -ALRM "$(cat "$work/0.pid")"
for ((tries = 0; tries < 100; tries++)); do alive "$(cat "$work/1.pid")" || break; sleep 0.1; done
if [ $tries = 100 ]; then
    kill -KILL "$(cat "$work/1.pid")"
    fail 'the stopped rank stays'
fi
wait $launcher
code=$?
expect 1 'MPI did not start: a rank has been stopped, hangs, or cannot be reached' 'a rank is stopped before MPI has started'
finish
