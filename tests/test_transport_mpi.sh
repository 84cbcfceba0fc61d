#!/bin/bash
# The mpi transport under mpirun: the cases on 1 to 4 processes, what does not match, memory that cannot be shared, and
# nothing left behind by a killed rank. Called by `make test` with BUILD and MPI set.
. "$(dirname "$0")/script.sh"
. tests/mpi_cases.sh

# passes LINE WHAT
passes() { [ "$code" = 0 ] && grep -qx "$1" "$work/output" || fail "$2" "$work/output"; }

# fails LINE WHAT: a non-zero exit and a line that matches
fails() {
    [ "$code" != 0 ] && grep -q "^test_transport_mpi: $1" "$work/output" || fail "$2: expected the line '$1'" "$work/output"
}

every_case
start 4 private 0
passes 'private memory: passed' 'a rank that cannot make a file'
start 4 private 1
passes 'private memory: passed' "a rank that cannot open its peer's file"

for tries in 1 2 3; do
    start 2 wait
    [ "$code" = 0 ] && break
done
passes 'waited 2 s with [0-4]\.[0-9]* % of a core' 'one waits for the other'

start 2 labels
label='step 30[01] bucket -*[12] compressor [01]'
fails "rank [01] sent $label where rank [01] expected $label" 'labels differ'
start 2 sizes
fails 'rank [01] sent [23]00000 bytes where rank [01] expected [23]00000' 'sizes differ'
start 2 longer
fails 'rank [01] sent .* bytes where rank [01] expected .*' 'sizes differ between nodes'

# Shared memory of killed ranks goes with them
killed 2 hold
ls /dev/shm 2>/dev/null | grep -q tandem && fail 'shared memory was left behind'
finish
