#!/bin/bash
# bench/gpu and build/gpu_rates where the CPU stands in for a GPU: every part ends, every row is there, rates are more
# than 0; without a GPU, one clear line. In the parts that train, it is the cpu device that trains: what is tested is
# what the script makes of it.
. "$(dirname "$0")/script.sh"

printf '%s\n' '[model]' 'layers = 1' 'heads = 2' 'channels = 32' 'context = 32' 'vocab = 257' '[data]' 'train = none' \
    'tokenizer = none' >"$work/t.cfg"
small="--square 64 --copy-mib 1 --round-ms 0 --rounds 1"
mkdir -p "$work/build/tests" "$work/bin"
for program in gpu_rates prepare golden; do ln -s "$PWD/$BUILD/$program" "$work/build"; done
ln -s /bin/true "$work/build/tests/test_cuda_optim"
echo test_cuda_optim >"$work/build/card_tests"
trainer=$(realpath "$TRAIN")
cat >"$work/build/train" <<END
#!/bin/bash
for argument; do
    case \$argument in
    --plan) exec $trainer "\$@" ;;
    run.device=cuda) arguments+=(run.device=cpu) ;;
    train.dtype=* | run.cuda_graphs=yes | run.deterministic=no | comm.transport=nccl) ;;
    *) arguments+=("\$argument") ;;
    esac
done
exec $trainer "\${arguments[@]}" run.threads=1
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
grep -qE '^\| 2 ranks on the card, threads, int8 *\| .*ok' "$work/out/gpu.md" || fail "int8: $(cat "$work/out/gpu.md")"
tail -1 "$work/out/gpu.md" | grep -qE '^\| whole run, once built *\| [0-9]+ s *\| 300 s *\| ok' || fail "the end: $(cat "$work/out/gpu.md")"

# Another learning rate on the "GPU": losses that differ are noticed, and so is one that is missing.
sed -i 's/run.device=cpu)/run.device=cpu optim.lr=1e-2)/' "$work/build/train"
bench curves
[ $? = 1 ] && grep -qE '^\| losses, 25 steps, f32 .*FAILED' "$work/out/gpu.md" || fail "curves: $(cat "$work/out/gpu.md")"
sed -i 's/optim.lr=1e-2/train.steps=20/' "$work/build/train"
bench curves
[ $? = 1 ] && grep -qE '^\| losses, 25 steps, f32 .*FAILED' "$work/out/gpu.md" || fail "steps: $(cat "$work/out/gpu.md")"

# A CPU that fails is no excuse; one that is slow is compared as far as it came.
sed -i 's/ train.steps=20)/)/' "$work/build/train"
cp "$work/build/train" "$work/good"
sed -i '2i case "$*" in *run.device=cpu*) echo "train: no"; exit 3 ;; esac' "$work/build/train"
bench curves
[ $? = 1 ] && grep -qE '^\| losses, CPU against GPU *\| the CPU, after 0 steps: no .*FAILED' "$work/out/gpu.md" ||
    fail "a CPU that fails: $(cat "$work/out/gpu.md")"
cp "$work/good" "$work/build/train"
sed -i '2i case "$*" in *run.device=cpu*) '"$trainer"' "$@" train.steps=22 run.threads=1; exit 124 ;; esac' "$work/build/train"
bench curves
cp "$work/good" "$work/build/train"
grep -qE '^\| losses, 22 steps, f32 *\| CPU' "$work/out/gpu.md" || fail "a slow CPU: $(cat "$work/out/gpu.md")"

# What fails in training or in gpu_rates is a failure, and not something that is not there.
sed -i '2i case "$*" in *run.device=cuda*) echo "train: no card"; echo -----; exit 1 ;; esac' "$work/build/train"
rm "$work/build/gpu_rates"
printf '%s\n' '#!/bin/bash' '[ $# = 1 ] && echo card && exit' 'echo "{\"part\": \"copy\", \"rate\": 1}"' 'exit 1' \
    >"$work/build/gpu_rates"
chmod +x "$work/build/gpu_rates"
bench ranks rates step
[ $? = 1 ] || fail "training and rates that fail: $(cat "$work/out/gpu.md")"
for row in 'several ranks *\| no card' 'rates *\| not whole:' 'step bf16, B2 T32 *\| no card' 'step f32, B2 T32 *\| no card'; do
    grep -qE "^\| $row .*FAILED" "$work/out/gpu.md" || fail "no failure '$row': $(cat "$work/out/gpu.md")"
done
cp "$work/good" "$work/build/train"
ln -sf "$PWD/$BUILD/gpu_rates" "$work/build"

# Checks: all that is expected must be there and pass.
bench checks
[ $? = 0 ] && grep -qE '^\| tests of the CUDA code, on the card *\| 1 of 1 .*ok' "$work/out/gpu.md" &&
    grep -qE '^\| golden sets.*\| 5 of 5; attention: our own, cuDNN .*ok' "$work/out/gpu.md" || fail "checks: $(cat "$work/out/gpu.md")"
ln -sf /bin/true "$work/build/golden"
for expected in 'test_cuda_optim test_cuda_missing' ''; do
    echo "$expected" >"$work/build/card_tests"
    bench checks
    [ $? = 1 ] && grep -qE '^\| tests of the CUDA code, on the card .*FAILED' "$work/out/gpu.md" ||
        fail "checks of '$expected': $(cat "$work/out/gpu.md")"
done
grep -q test_cuda_ops "$BUILD/card_tests" || fail "test_cuda_ops is not for a card: $(cat "$BUILD/card_tests")"
grep -q test_cuda_emulator "$BUILD/card_tests" && fail 'a test with stand-ins is for a card'

# Stand-ins for compute-sanitizer and PyTorch: what they are given, and what becomes of their failing.
bench sanitizer
grep -q '^| compute-sanitizer *| not measured' "$work/out/gpu.md" || fail "no sanitizer: $(cat "$work/out/gpu.md")"
printf '%s\n' '#!/bin/bash' 'echo "$*" >>"$SEEN"' '[[ "$*" != *racecheck*optim* ]]' >"$work/bin/compute-sanitizer"
printf '%s\n' '#!/bin/bash' 'echo "$*" >>"$SEEN"' 'echo "x: 100.0 tokens/s, 2.0 ms per step"' >"$work/bin/python3"
chmod +x "$work"/bin/*
export SEEN=$work/seen
PATH=$work/bin:$PATH bench sanitizer pytorch
[ $? = 1 ] && grep -qE '^\| compute-sanitizer, memcheck *\| clean .*ok' "$work/out/gpu.md" &&
    grep -qE '^\| compute-sanitizer, racecheck *\| tests_test_cuda_optim .*FAILED' "$work/out/gpu.md" &&
    [ "$(grep -c '^--tool' "$SEEN")" = 10 ] && [ "$(grep -c 'racecheck --kernel-name regex=_Z' "$SEEN")" = 5 ] || fail "sanitizer: $(cat "$work/out/gpu.md" "$SEEN")"
grep -q ' 2 32 3 .*--layers 1 --heads 2 --channels 32 --context 32 --vocab 257' "$SEEN" || fail "PyTorch: $(cat "$SEEN")"

# What its time is too short for is not measured; a hazard that was seen is one, and ranks may have hung.
printf '%s\n' '#!/bin/bash' '[[ "$*" != *compress* ]] || sleep 100' '[[ "$*" != *memcheck*optim* ]]' >"$work/bin/compute-sanitizer"
PATH=$work/bin:$PATH bench --limit-s 6 sanitizer
[ $? = 1 ] && grep -qE '^\| compute-sanitizer, memcheck *\| tests_test_cuda_optim; out of time: tests_test_cuda_compress .*FAILED' \
    "$work/out/gpu.md" && grep -q '^| compute-sanitizer, racecheck *| not measured: out of time: tests_test_cuda_compress *|' "$work/out/gpu.md" ||
    fail "a sanitizer that is out of time: $(cat "$work/out/gpu.md")"
# stopped SIGNAL WHOM CODE: what runs at that time has ended when the script has
sed -i '2i case "$*" in *--plan*) ;; *run.device=c*) echo $$ >>"$RUNNING"; exec sleep 100 ;; esac' "$work/build/train"
export RUNNING=$work/running
stopped() {
    local process found=0 tries=0
    : >"$RUNNING"
    setsid env --default-signal=INT bench/gpu --build "$work/build" --config "$work/t.cfg" --out "$work/out" curves \
        >"$work/log" 2>"$work/errors" &
    process=$!
    while [ "$(wc -l <"$RUNNING")" -lt 2 ] && [ $((tries++)) -lt 400 ]; do sleep 0.05; done
    kill -"$1" -- "${2/process/$process}"
    wait $process || found=$?
    [ $found = "$3" ] && [ "$(wc -l <"$RUNNING")" = 2 ] || fail "$1: exit $found, not $3: $(cat "$work/errors" "$RUNNING")"
    while read -r process; do
        alive "$process" && { fail "$1: something runs on"; kill "$process"; }
    done <"$RUNNING"
}
stopped INT -process 130 # Ctrl-C: to the group
stopped TERM process 143
bench --limit-s 6 ranks step
[ $? = 1 ] && grep -qE '^\| several ranks .*\(out of time\) .*FAILED' "$work/out/gpu.md" &&
    grep -qE '^\| step bf16, B2 T32 *\| not measured: out of time' "$work/out/gpu.md" &&
    grep -qE '^\| step f32, B2 T32 *\| not measured: out of time' "$work/out/gpu.md" &&
    grep -q '^| whole run' "$work/out/gpu.md" || fail "out of time: $(cat "$work/out/gpu.md")"
bench --limit-s 1 ranks
[ $? = 0 ] && grep -q '^| ranks *| not measured: out of time' "$work/out/gpu.md" || fail "no time: $(cat "$work/out/gpu.md")"
cp "$work/good" "$work/build/train"

bench --batch 1 step
[ "$(grep -c '^| step bf16, B1 T32, CUDA graphs' "$work/out/gpu.md")" = 1 ] || fail "one row of B1: $(cat "$work/out/gpu.md")"
# Without --batch: what fits, which is the most that is tried.
bench/gpu --build "$work/build" --config "$work/t.cfg" --seq-len 8 --steps 3 --out "$work/out" step >"$work/log" 2>"$work/errors"
for row in 'bf16, B64 T8' 'bf16, B64 T8, not deterministic' 'f32, B8 T8'; do
    grep -q "^| step $row *| [0-9]" "$work/out/gpu.md" || fail "no step $row: $(cat "$work/out/gpu.md" "$work/errors")"
done

bench pytorch
grep -q '^| PyTorch *| not measured' "$work/out/gpu.md" || fail "PyTorch: $(cat "$work/out/gpu.md")"
CUDART_DEVICES=0 bench
[ $? = 1 ] && [ "$(cat "$work/errors")" = "gpu: no GPU was found: none is visible to this process" ] ||
    fail "without a GPU: $(cat "$work/log" "$work/errors")"
# Where there is a card but not its build it goes on to make one; a folder stands in for /dev, a stub for make.
mkdir "$work/dev"
touch "$work/dev/null" "$work/dev/nvidia0"
printf '%s\n' '#!/bin/bash' 'exit 1' >"$work/bin/make"
chmod +x "$work/bin/make"
if unshare -rm true 2>/dev/null; then
    # shellcheck disable=SC2016
    PATH=$work/bin:$PATH unshare -rm bash -c 'mount --bind /dev/null "$0/dev/null" && mount --rbind "$0/dev" /dev &&
        exec bench/gpu --out "$0/out"' "$work" >"$work/log" 2>"$work/errors"
    grep -qE 'nvcc is missing|the build failed' "$work/errors" || fail "a card: $(cat "$work/log" "$work/errors")"
fi
rm "$work/bin/make"

# wrong TEXT ARGS...: one line, exit 2, nothing written
wrong() {
    bench/gpu --build "$work/build" --out "$work/new" "${@:2}" >"$work/log" 2>"$work/errors"
    [ $? = 2 ] && [ "$(wc -l <"$work/errors")" = 1 ] && grep -q -e "$1" "$work/errors" && [ ! -e "$work/new" ] ||
        fail "${*:2}: $(cat "$work/errors")"
}
wrong "unknown argument 'nothing'" nothing
wrong "unknown option '--foo'" --foo
wrong '--steps: expected a value' --steps
wrong '--batch abc: expected a whole number' --batch abc
wrong '--limit-s 0: expected a whole number' --limit-s 0
wrong "--config $work/none: there is no such file" --config "$work/none"
wrong '--out /dev/full/x: ' --out /dev/full/x
mkdir -p "$work/theirs/work/precious"
wrong "somebody else" --out "$work/theirs"
[ -e "$work/theirs/work/precious" ] || fail 'another folder was emptied'
finish
