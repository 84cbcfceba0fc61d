#!/bin/bash
# bench/gpu and build/gpu_rates where the CPU stands in for a GPU: every part ends, every row is there, rates are more
# than 0; without a GPU, one clear line.
set -u
cd "$(dirname "$0")/.." || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
fail() { echo "FAIL: $*"; failures=1; }

printf '%s\n' '[model]' 'layers = 1' 'heads = 2' 'channels = 32' 'context = 32' 'vocab = 257' '[data]' 'train = none' \
    'tokenizer = none' >"$work/t.cfg"
small="--square 64 --copy-mib 1 --round-ms 0 --rounds 1"
bench() {
    bench/gpu --build "$BUILD" --config "$work/t.cfg" --batch 2 --seq-len 32 --steps 1 --curve-steps 2 --rates "$small" \
        --out "$work/out" "$@" >"$work/log" 2>"$work/errors"
}

bench rates || fail "rates: exit $?: $(cat "$work/errors")"
rates=$work/out/work/rates.jsonl
for row in '"copy"' '"matmul", "type": "f32"' '"matmul", "type": "tf32"' '"matmul", "type": "bf16"' '"encode", "type": "int8"' \
    '"decode_add", "type": "topk 1 %"' '"best", "type": "bf16"' '"model"' '"attention", "type": "own", "what": "forward' \
    '"attention", "type": "cuDNN", "what": "backward' '"attention", "type": "cuDNN deterministic"'; do
    grep "\"part\": $row" "$rates" | grep -qE '"rate": [0-9.e+-]*[1-9]' || fail "no row $row: $(cat "$rates")"
done
for row in 'copy within memory *| [0-9]+ GB/s' 'matmul bf16, best shape' 'attention backward, bf16: cuDNN, own' \
    'topk 1 % encode'; do
    grep -qE "^\| $row" "$work/out/gpu.md" || fail "the table has no '$row': $(cat "$work/out/gpu.md")"
done
grep -q 'not measured' "$work/out/gpu.md" && fail "not measured: $(cat "$work/out/gpu.md")"

bench pytorch
grep -q '^| PyTorch *| not measured' "$work/out/gpu.md" || fail "PyTorch: $(cat "$work/out/gpu.md")"
CUDART_DEVICES=0 bench
[ $? = 1 ] && [ "$(cat "$work/errors")" = "gpu: no GPU was found: none is visible to this process" ] ||
    fail "without a GPU: $(cat "$work/log" "$work/errors")"
bench nothing
[ $? = 2 ] && grep -q "unknown argument 'nothing'" "$work/errors" || fail "an unknown part: $(cat "$work/errors")"
exit $failures
