#!/bin/bash
# The Makefile: nothing is built twice, other flags build anew, CC on the command line leaves MPI's compiler in place;
# what is said of CUDA.
. "$(dirname "$0")/script.sh"
unset MAKEFLAGS MFLAGS MAKELEVEL CC # of a make that runs this test
object=$work/obj/base/clock.o

# build yes|no ARGS...: whether make ARGS... builds the object anew
build() {
    local expected=$1 before after
    shift
    before=$(stat -c %y "$object" 2>/dev/null)
    make -s V=1 BUILD="$work" "$@" "$object" >"$work/log" 2>&1 || fail "make $*: $(cat "$work/log")"
    after=$(stat -c %y "$object")
    [ "$([ "$before" = "$after" ] && echo no || echo yes)" = "$expected" ] || fail "expected '$expected' of make $*"
}
for change in "MPI=0 OPT=-O0" "MPI=0 OPT=-O1" "MPI=1 OPT=-O1" "MPI=0 OPT=-O1 EXTRA_CFLAGS=-DX" "MPI=0 OPT=-O1 CC=cc"; do
    build yes $change
    build no $change
done
line=$(make -n V=1 MPI=1 CC=other BUILD="$work" "$work/obj/comm/transport/transport_mpi.o" | grep transport_mpi.c)
[[ $line == *"OMPI_CC=other mpicc "* ]] || fail "the MPI transport's compiler: $line"

# cuda RELEASE TEXT: what make says of CUDA where nvcc is of that release
cuda() {
    printf '#!/bin/sh\necho "Cuda compilation tools, release %s, V%s.89"\n' "$1" "$1" >"$work/cuda/bin/nvcc"
    chmod +x "$work/cuda/bin/nvcc"
    line=$(make -n CUDA=auto CUDA_HOME="$work/cuda" BUILD="$work" TRAIN="$work/train" all 2>&1 | grep "^echo 'CUDA: ")
    [[ $line == *"CUDA: $2"* ]] || fail "nvcc $1: expected '$2': $line"
}
mkdir -p "$work/cuda/bin" "$work/cuda/lib64"
cuda 13.0 'left out: no libcudart libcublasLt in CUDA_HOME='
touch "$work/cuda/lib64/"lib{cudart,cublasLt}.so
cuda 13.0 'for sm_80 and sm_90, '
cuda 20.1 'for sm_80 and sm_90, '
cuda 9.2 "left out: nvcc 9.2, 13 is needed'"
cuda 11.8 "left out: nvcc 11.8, 13 is needed'"
make -n CUDA=1 CUDA_HOME="$work/cuda" BUILD="$work" all 2>&1 |
    grep -q 'CUDA=1: nvcc 11\.8, 13 is needed\.  Stop\.$' || fail 'CUDA=1 with an old nvcc'

# linked TEST: what make links for it
linked() {
    make -n V=1 MPI=0 CUDA=0 BUILD="$work" TRAIN="$work/train" TEST="$1" tests | grep -oE -- ' -o [^ ]+$' |
        sed "s,^ -o $work/,,;/\.o$/d" | sort | paste -sd' '
}
[ "$(linked 'test_ops test_sync')" = 'tests/test_ops tests/test_sync' ] || fail 'two test programs'
[[ $(linked test_comm_mpi.sh) == *' golden '*' tests/test_comm_mpi '*' train' ]] || fail "test_comm_mpi.sh: its program"
[ "$(linked test_golden.sh)" = "$(linked '' | tr ' ' '\n' | grep -v ^tests/ | paste -sd' ')" ] || fail 'all programs for a script'
finish
