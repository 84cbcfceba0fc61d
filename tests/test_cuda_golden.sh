#!/bin/bash
# build/golden on the CUDA device: f32, tf32 and bf16, the tied embedding in one gradient and in two; a NaN is refused.
# Also with threads of a block in random order and streams that run behind.
. "$(dirname "$0")/script.sh"

for run in tiny/f32 tiny/tf32 tiny/bf16 odd/f32 odd/bf16; do
    name=${run%/*} dtype=${run#*/}
    "$BUILD/golden" --device cuda-$dtype tests/data $name || fail "$name, $dtype"
    EMULATOR_SEED=7 CUDART_LATE=1 "$BUILD/golden" --device cuda-$dtype --split tests/data $name ||
        fail "$name, $dtype, the tied embedding in two gradients"
done
# A parameter of the second layer is NaN, 4,096 bytes before the end.
cp tests/data/tiny_* "$work"
size=$(stat -c %s tests/data/tiny_model.bin)
printf '\x00\x00\xc0\x7f' | dd of="$work/tiny_model.bin" bs=1 seek=$((size - 4096)) conv=notrunc 2>/dev/null
for dtype in f32 bf16; do
    "$BUILD/golden" --device cuda-$dtype "$work" tiny >"$work/log" 2>&1
    [ $? = 1 ] && grep -qi '^loss .* n/a .*MISS' "$work/log" || fail "NaN, $dtype: $(cat "$work/log")"
done
finish
