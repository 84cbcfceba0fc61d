# What the tests of run.device share; they source it behind script.sh.
tiny model.layers=1 model.channels=16 model.context=32 data.tokenizer=none train.seq_len=32 train.batch=1

# expect EXIT REGEX ARGS...: ./train --plan ARGS ends so, and a line of what it prints matches
expect() {
    local code=$1 regex=$2 output found
    shift 2
    output=$("$TRAIN" --plan "$work/t.cfg" run.out="$work/out" "$@" 2>"$work/errors")
    found=$?
    output+=$'\n'$(cat "$work/errors")
    [ $found = "$code" ] || fail "$*: expected exit $code, found $found: $output"
    grep -qE "$regex" <<<"$output" || fail "$*: expected '$regex', found: $output"
    [ "$code" = 0 ] || [ "$(wc -l <"$work/errors")" = 1 ] || fail "$*: expected one line, found: $output"
    [ -z "$(ls "$work/out" 2>/dev/null)" ] || fail "$*: wrote $(ls "$work/out")"
}
