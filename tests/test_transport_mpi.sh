#!/bin/sh
# The mpi transport under mpirun: the cases on 1 to 4 processes, what does not match, memory that cannot be shared, and
# nothing left behind by a killed rank. Called by `make test` with BUILD and MPI set.
set -u
program=${BUILD:-build}/tests/test_transport_mpi
if [ "${MPI:-1}" = 0 ]; then
    echo "test_transport_mpi.sh: skipped: built without MPI"
    exit 0
fi
[ -x "$program" ] || { echo "test_transport_mpi.sh: $program is missing"; exit 1; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # Open MPI refuses root without them
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

fail() {
    echo "test_transport_mpi.sh: $1"
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

# passes LINE WHAT
passes() { [ "$code" = 0 ] && grep -qx "$1" "$folder/output" || fail "$2"; }

# fails LINE WHAT: a non-zero exit and a line that matches
fails() { [ "$code" != 0 ] && grep -q "^test_transport_mpi: $1" "$folder/output" || fail "$2: expected the line '$1'"; }

for ranks in 1 2 3 4; do
    start "$ranks" cases
    passes "$ranks ranks on mpi: all cases passed" "cases on $ranks ranks"
done
start 4 private 0
passes 'private memory: passed' 'a rank that cannot make a file'
start 4 private 1
passes 'private memory: passed' "a rank that cannot open its peer's file"

start 2 wait 0.2
passes 'waited 0\.[0-9]* s with [0-9.]* % of a core' 'one waits for the other'

start 2 labels
label='step 30[01] bucket -*[12] compressor [01]'
fails "rank [01] sent $label where rank [01] expected $label" 'labels differ'
start 2 sizes
fails 'rank [01] sent [23]00000 bytes where rank [01] expected [23]00000' 'sizes differ'
start 2 longer
fails 'rank [01] sent .* bytes where rank [01] expected .*' 'sizes differ between nodes'

# Shared memory of killed ranks goes with them
mpirun --oversubscribe -n 2 "$program" hold "$folder" >"$folder/output" 2>&1 &
launcher=$!
tries=0
while [ "$(cat "$folder"/?.pid 2>/dev/null | wc -l)" != 2 ] && [ $tries -lt 300 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
kill -9 "$(cat "$folder/1.pid")" || kill $launcher
wait $launcher && fail 'a killed rank: exit code 0'
alive() { grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2>/dev/null; } # not a zombie
for rank in 0 1; do
    tries=0
    while alive "$(cat "$folder/$rank.pid")" && [ $tries -lt 100 ]; do
        sleep 0.1
        tries=$((tries + 1))
    done
    [ $tries -lt 100 ] || fail "rank $rank lives on after rank 1 was killed"
done
ls /dev/shm 2>/dev/null | grep -q tandem && fail 'shared memory was left behind'

[ $failures = 0 ] && echo "test_transport_mpi.sh: passed"
exit $failures
