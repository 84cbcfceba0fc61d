#!/bin/bash
# bench/gpu and build/gpu_rates where the CPU stands in for a GPU: every part ends, every row is there, rates are more
# than 0; without a GPU, one clear line. In the parts that train, it is the cpu device that trains: what is tested is
# what the script makes of it.
. "$(dirname "$0")/script.sh"

printf '%s\n' '[model]' 'layers = 1' 'heads = 2' 'channels = 32' 'context = 32' 'vocab = 257' '[data]' 'train = none' \
    'tokenizer = none' >"$work/t.cfg"
small="--square 64 --copy-mib 1 --round-ms 0 --rounds 1"
mkdir "$work/build"
for program in gpu_rates prepare golden; do ln -s "$PWD/$BUILD/$program" "$work/build"; done
cat >"$work/build/train" <<END
#!/bin/bash
for argument; do
    case \$argument in
    run.device=cuda) arguments+=(run.device=cpu) ;;
    train.dtype=* | run.cuda_graphs=yes | run.deterministic=no | comm.transport=nccl) ;;
    *) arguments+=("\$argument") ;;
    esac
done
exec $PWD/$BUILD/train "\${arguments[@]}" run.threads=1
END
chmod +x "$work/build/train"
bench() {
    bench/gpu --build "$work/build" --config "$work/t.cfg" --batch 2 --seq-len 32 --steps 3 --curve-steps 25 --rates "$small" \
        --out "$work/out" "$@" >"$work/log" 2>"$work/errors"
}

bench rates || fail "rates: exit $?: $(cat "$work/errors")"
rates=$work/out/work/rates.jsonl
for row in '"copy"' '"matmul", "type": "f32"' '"matmul", "type": "tf32"' '"matmul", "type": "bf16"' '"encode", "type": "int8"' \
    '"decode_add", "type": "topk 1 %"' '"best", "type": "bf16"' '"model"' '"attention", "type": "own", "what": "forward' \
    '"attention", "type": "cuDNN", "what": "backward' '"attention", "type": "cuDNN deterministic"'; do
    grep "\"part\": $row" "$rates" | grep -qE '"rate": [0-9.e+-]*[1-9]' || fail "no row $row: $(cat "$rates")"
done
for row in 'copy within memory *\| [0-9]+ GB/s' 'matmul bf16, best shape' 'attention backward, bf16: cuDNN, own' \
    'topk 1 % encode'; do
    grep -qE "^\| $row" "$work/out/gpu.md" || fail "the table has no '$row': $(cat "$work/out/gpu.md")"
done
grep -q 'not measured' "$work/out/gpu.md" && fail "not measured: $(cat "$work/out/gpu.md")"

bench ranks curves rates step || fail "what trains: exit $?: $(cat "$work/errors" "$work/out/gpu.md")"
grep -qE '^\| 2 ranks on the card, threads *\| .*ok' "$work/out/gpu.md" || fail "ranks: $(cat "$work/out/gpu.md")"
[ $MPI = 1 ] || grep -q '^gpu: 2 ranks on the card, MPI.*: not measured: .*MPI$' "$work/errors" ||
    fail "without MPI: $(cat "$work/errors")"
for row in 'losses, 25 steps, f32 *\| CPU .*ok' 'losses, 25 steps, bf16 *\| .*ok' \
    'step bf16, B2 T32 *\| [0-9.]+ ms, [0-9]+ tokens/s' 'step bf16, B2 T32, CUDA graphs *\| [0-9.]+ ms' \
    'step bf16, B1 T32 *\| [0-9.]+ ms' 'step bf16, B1 T32, CUDA graphs *\| [0-9.]+ ms' 'MFU bf16, of the best matmul *\| [0-9.]*[1-9]' 'step f32'; do
    grep -qE "^\| $row" "$work/out/gpu.md" || fail "the table has no '$row': $(cat "$work/out/gpu.md")"
done
# Another learning rate on the "GPU": losses that differ are noticed, and so is one that is missing.
sed -i 's/run.device=cpu)/run.device=cpu optim.lr=1e-2)/' "$work/build/train"
bench curves
[ $? = 1 ] && grep -qE '^\| losses, 25 steps, f32 .*FAILED' "$work/out/gpu.md" || fail "curves: $(cat "$work/out/gpu.md")"
sed -i 's/optim.lr=1e-2/train.steps=20/' "$work/build/train"
bench curves
[ $? = 1 ] && grep -qE '^\| losses, 25 steps, f32 .*FAILED' "$work/out/gpu.md" || fail "steps: $(cat "$work/out/gpu.md")"

bench pytorch
grep -q '^| PyTorch *| not measured' "$work/out/gpu.md" || fail "PyTorch: $(cat "$work/out/gpu.md")"
CUDART_DEVICES=0 bench
[ $? = 1 ] && [ "$(cat "$work/errors")" = "gpu: no GPU was found: none is visible to this process" ] ||
    fail "without a GPU: $(cat "$work/log" "$work/errors")"
bench nothing
[ $? = 2 ] && grep -q "unknown argument 'nothing'" "$work/errors" || fail "an unknown part: $(cat "$work/errors")"
finish
