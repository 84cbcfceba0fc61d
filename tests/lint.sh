#!/bin/bash
# The house's include rules (README, "The house"): who may include whom. Prints each line that breaks one; exit 1 if any.
set -u
cd "$(dirname "$0")/.." || exit 1
failures=0
sources() { find train.c generate.c base bench comm data model optim run tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp'; }

# allow FOLDER-PATTERN REGEX: every #include "..." in files whose path matches the pattern must match the regex
allow() {
    local bad
    bad=$(grep -nE '^ *#include "' $(sources | grep -E "$1") /dev/null | grep -vE "#include \"($2)\"")
    [ -z "$bad" ] || { printf 'may only include %s:\n%s\n' "$2" "$bad"; failures=1; }
}
# only REGEX FILES: a system header that only these files may include
only() {
    local bad
    bad=$(grep -nE "^ *#include <($1)>" $(sources | grep -vE "$2") /dev/null)
    [ -z "$bad" ] || { printf 'only %s may include it:\n%s\n' "$2" "$bad"; failures=1; }
}

allow '^base/'            'base/[a-z0-9_]+\.(h|cuh)|tests/cuda/emulator\.h'
allow '^data/'            '(base|data)/[a-z0-9_]+\.h'
allow '^model/'           '(base|model)/[a-z0-9_]+\.(h|cuh)'
allow '^optim/'           '(base|optim)/[a-z0-9_]+\.(h|cuh)'
allow '^comm/transport/'  '(base|comm/transport)/[a-z0-9_]+\.(h|cuh)'
allow '^comm/compress/'   '(base|comm/compress)/[a-z0-9_]+\.(h|cuh)'
allow '^comm/collective/' '(base|comm/transport|comm/compress|comm/collective)/[a-z0-9_]+\.(h|cuh)'
allow '^comm/[^/]+$'      '(base|comm|comm/[a-z]+)/[a-z0-9_]+\.h'
allow '^run/'             '((base|data|model|optim|run)/[a-z0-9_]+|comm/comm)\.h'
allow '^(train|generate)\.c$' '((base|data|model|optim|run)/[a-z0-9_]+|comm/comm)\.h'
only 'mpi\.h'             '^comm/transport/transport_mpi\.c$'
only 'nccl\.h'            '^comm/transport/transport_nccl\.cu$|^tests/cuda/'
only '(cuda|cublas|cudnn)[A-Za-z0-9_]*\.h' '\.cuh?$|^tests/cuda/'
exit $failures
