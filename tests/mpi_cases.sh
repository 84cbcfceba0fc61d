# What the tests of a test program under mpirun share, which has their name; they source it behind script.sh.
needs_mpi
program=$BUILD/tests/$(basename "$0" .sh)
[ -x "$program" ] || { fail "$program is missing"; finish; }

# start RANKS ARGUMENTS...: runs them, at most a minute; sets code
start() {
    timeout 60 mpirun --oversubscribe -n "$1" "$program" "${@:2}" >"$work/output" 2>&1
    code=$?
}

every_case() {
    local ranks
    for ranks in 1 2 3 4; do
        start $ranks cases
        [ $code = 0 ] && grep -qx "$ranks ranks on mpi: all cases passed" "$work/output" ||
            fail "cases on $ranks ranks" "$work/output"
    done
}

# killed RANKS CASE: kills rank 1 of a case that goes on for ever and whose ranks write their process ids to $work; sets
# code, and expects nobody to stay behind
killed() {
    local launcher tries rank
    mpirun --oversubscribe -n "$1" "$program" "$2" "$work" >"$work/output" 2>&1 &
    launcher=$!
    for ((tries = 0; tries < 300 && $(cat "$work"/?.pid 2>/dev/null | wc -l) < $1; tries++)); do sleep 0.1; done
    kill -9 "$(cat "$work/1.pid")" || kill $launcher
    wait $launcher
    code=$?
    [ $code != 0 ] || fail "a killed rank: exit code 0"
    for ((rank = 0; rank < $1; rank++)); do # they are gone already, but may take a moment to leave the process table
        for ((tries = 0; tries < 100; tries++)); do alive "$(cat "$work/$rank.pid")" || break; sleep 0.1; done
        [ $tries -lt 100 ] || fail "rank $rank lives on after rank 1 was killed"
    done
}
