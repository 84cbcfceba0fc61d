# What the tests of run.device share; they source it. Needs $work, a folder.
failures=0
fail() { echo "FAIL: $*"; failures=1; }

"$BUILD/prepare" --tokenizer bytes --out "$work" --val 0.1 t tests/data/emma.txt >/dev/null || fail prepare
cat >"$work/t.cfg" <<CFG
[model]
layers = 1
heads = 2
channels = 16
context = 32
vocab = 257
[data]
train = $work/t_train_*.bin
tokenizer = none
[train]
seq_len = 32
batch = 1
CFG

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
