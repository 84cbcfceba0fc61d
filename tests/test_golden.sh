#!/bin/bash
# build/golden accepts the reference sets and refuses a wrong logit, a NaN, and a file that is none.
. "$(dirname "$0")/script.sh"

for name in tiny odd; do
    "$BUILD/golden" tests/data $name || fail "$name"
    "$BUILD/golden" --split tests/data $name || fail "$name, the tied embedding in two gradients"
done
# damage OFFSET BYTES: tiny with bytes of its state file replaced
damage() {
    cp tests/data/tiny_* "$work"
    printf "$2" | dd of="$work/tiny_state.bin" bs=1 seek="$1" conv=notrunc 2>/dev/null
    "$BUILD/golden" "$work" tiny >"$work/log" 2>&1
    local code=$?
    [ $code = "$3" ] || fail "bytes at $1: expected exit $3, found $code"
}
size=$(stat -c %s tests/data/tiny_state.bin)
damage $((size - 4)) '\x00\x00\x80\x3f' 1 # the last gradient
damage $((size - 4)) '\x00\x00\xc0\x7f' 1 # NaN
damage $((size / 2)) '\x00\x00\xc0\x7f' 1
damage 0 'text' 2
cp tests/data/tiny_* "$work"
head -3 tests/data/tiny_train.txt >"$work/tiny_train.txt"
"$BUILD/golden" "$work" tiny >/dev/null 2>"$work/log"
[ $? = 2 ] && grep -q "tiny_train.txt: expected 10 lines, found 3" "$work/log" || fail "3 steps: $(cat "$work/log")"
finish
