# tandem. `make help` lists the targets. Needs GNU make, a C11 compiler and the libraries that `make deps` installs.
#
#   MPI=0          leave MPI out: ranks are threads of one process
#   CUDA=0 | 1     leave NVIDIA GPUs out, or insist on them; auto (the default) builds for them where nvcc and its
#                  libraries are: CUDA_HOME, CUDNN_HOME, NCCL_HOME say where. emulate: kernels run on the CPU, for tests
#   ARCH=x86-64-v3 compile for other machines than this one (default: native)
#   BUILD=folder   where objects and programs go (default: build)
#   V=1            show the commands

MPI   ?= 1
CUDA  ?= auto
ARCH  ?= native
BUILD ?= build
TRAIN ?= train
OPT   ?= -O3
OPENMP ?= -fopenmp

CC     := $(if $(filter default,$(origin CC)),gcc,$(CC))
MPICC  ?= mpicc
LIBS   := openblas hwloc libcjson libpcre2-8
WARN   := -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla $(if $(CI),-Werror)
CFLAGS := -std=c11 $(OPT) -g -march=$(ARCH) -fno-math-errno $(OPENMP) $(WARN) -I. -MMD -MP \
          $(shell pkg-config --cflags $(LIBS) 2>/dev/null) $(EXTRA_CFLAGS)
LDLIBS := -Wl,--as-needed $(shell pkg-config --libs $(LIBS) 2>/dev/null) -linih -lz -lm $(OPENMP) $(EXTRA_CFLAGS)

# Named kernels may reorder sums to use vectors. NaN and Inf keep their meaning everywhere.
KERNELS := model/ops_cpu%
KERNEL_CFLAGS := -fassociative-math -fno-signed-zeros -fno-trapping-math -freciprocal-math -ffp-contract=fast

# ---- CUDA ----
CUDA_HOME ?= $(or $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v nvcc))),/usr/local/cuda)
NVCC      := $(wildcard $(CUDA_HOME)/bin/nvcc)
# The first of a library's files, or of a header's, in some homes.
library = $(firstword $(wildcard $(foreach home,$(2),$(foreach lib,lib64 lib lib/x86_64-linux-gnu, \
                                 $(home)/$(lib)/lib$(1).so $(home)/$(lib)/lib$(1).so.*))))
header  = $(firstword $(wildcard $(foreach home,$(2),$(home)/include/$(1))))
CUDNN_HOMES := $(CUDNN_HOME) $(CUDA_HOME) /usr/local /usr
NCCL_HOMES  := $(NCCL_HOME) $(CUDA_HOME) /usr/local /usr
CUDA_HEADERS := $(and $(call header,cuda_runtime.h,$(CUDA_HOME)),$(call header,cublasLt.h,$(CUDA_HOME)))
CUDA_LACKS := $(strip $(if $(NVCC),,nvcc) \
                      $(foreach name,cudart cublasLt,$(if $(call library,$(name),$(CUDA_HOME)),,lib$(name))))
CUDA_OLD = $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p' | \
                   awk '$$1 < 13 { print "nvcc " $$1 ", 13 is needed" }')
CUDA_BARRED := $(if $(filter auto 1,$(CUDA)),$(if $(CUDA_LACKS),no $(CUDA_LACKS) in CUDA_HOME=$(CUDA_HOME),$(CUDA_OLD)))

# CUDA_MODE is what CUDA comes to: 0, 1 or emulate.
ifeq ($(CUDA),auto)
CUDA_MODE := $(if $(CUDA_BARRED),0,1)
CUDA_SAYS := $(if $(CUDA_BARRED),left out: $(CUDA_BARRED))
else
CUDA_MODE := $(CUDA)
CUDA_SAYS := $(if $(filter 0,$(CUDA)),left out by CUDA=0)
endif
ifeq ($(CUDA_MODE),1)
$(if $(CUDA_BARRED),$(error CUDA=1: $(CUDA_BARRED)))
CUDNN := $(and $(call header,cudnn.h,$(CUDNN_HOMES)),$(call library,cudnn,$(CUDNN_HOMES)))
NCCL  := $(and $(call header,nccl.h,$(NCCL_HOMES)),$(call library,nccl,$(NCCL_HOMES)))
CUDA_LIBRARIES := $(call library,cudart,$(CUDA_HOME)) $(call library,cublasLt,$(CUDA_HOME)) $(CUDNN) $(NCCL)
CUDA_SAYS := for sm_80 and sm_90, $(CUDA_HOME), $(if $(CUDNN),cuDNN,no cuDNN: own attention), $(if $(NCCL),NCCL,no NCCL)
LDLIBS += $(CUDA_LIBRARIES) $(foreach dir,$(sort $(dir $(CUDA_LIBRARIES))),-Wl,-rpath,$(dir)) -lstdc++
else ifeq ($(CUDA_MODE),emulate)
$(if $(CUDA_HEADERS),,$(error CUDA=emulate, but there is no cuda_runtime.h and cublasLt.h in CUDA_HOME=$(CUDA_HOME)))
NCCL := $(wildcard tests/cuda/nccl.cpp)
CUDNN := tests/cuda/cudnn_graph.cpp
CUDA_SAYS := emulated on the CPU, headers of $(CUDA_HOME)
LDLIBS += -lstdc++
else ifneq ($(CUDA_MODE),0)
$(error CUDA is 0, 1, auto or emulate)
endif
CUDA_DEFINES := $(if $(filter-out 0,$(CUDA_MODE)),-DHAVE_CUDA) $(if $(CUDNN),-DHAVE_CUDNN) $(if $(NCCL),-DHAVE_NCCL)
CFLAGS += $(CUDA_DEFINES)
CXX := $(if $(filter default,$(origin CXX)),$(if $(findstring clang,$(CC)),clang++,g++),$(CXX))
CXXFLAGS := -std=c++20 $(OPT) -g -march=$(ARCH) -ffp-contract=off $(OPENMP) -Wall -Wextra -Wshadow \
            -Wno-unknown-pragmas $(if $(CI),-Werror) -I. -MMD -MP -DCUDA_EMULATED $(CUDA_DEFINES) \
            -isystem $(CUDA_HOME)/include \
            $(shell pkg-config --cflags $(LIBS) 2>/dev/null) $(EXTRA_CFLAGS)
NVCCFLAGS := -std=c++20 -O3 -lineinfo -Xcompiler -Wall,-Wextra $(if $(CI),-Werror all-warnings) -I. -MMD -MP \
             $(CUDA_DEFINES) $(foreach home,$(CUDNN_HOME) $(NCCL_HOME),-isystem $(home)/include) \
             -gencode arch=compute_80,code=sm_80 -gencode 'arch=compute_90,code=[sm_90,compute_90]'
# Files whose results are the CPU's to the bit.
CUDA_EXACT := optim/% comm/%

# Programs with a main of their own, everything else is in the library.
PROGRAM_SOURCES := train.c generate.c data/prepare.c data/tokenize.c data/extract_text.c $(wildcard bench/*.c) \
                   tests/golden.c
TEST_SOURCES    := $(wildcard tests/test_*.c)
LIBRARY_SOURCES := $(filter-out $(PROGRAM_SOURCES), \
                     $(wildcard base/*.c data/*.c model/*.c optim/*.c comm/*.c comm/*/*.c run/*.c))
ifeq ($(CUDA_MODE),0)
TEST_SOURCES := $(filter-out tests/test_cuda_%, $(TEST_SOURCES))
PROGRAM_SOURCES := $(filter-out bench/gpu_%, $(PROGRAM_SOURCES))
else
LIBRARY_SOURCES := $(filter-out %_none.c, $(LIBRARY_SOURCES)) comm/compress/compress_none.c
TEST_SOURCES := $(filter-out $(if $(CUDNN),,tests/test_cuda_cudnn%), $(TEST_SOURCES))
LIBRARY_SOURCES += $(filter-out $(if $(findstring libcudnn,$(CUDNN)),,model/cudnn_graph.cu) \
                                $(if $(NCCL),,comm/transport/transport_nccl.cu), \
                     $(wildcard base/*.cu model/*.cu optim/*.cu comm/*/*.cu))
endif
# Tests that ask something of the emulator, and those of CUDA that a card can run: bench/gpu expects each of these.
STAND_IN_TESTS := $(shell grep -l '^.include "tests/cuda/stand_ins\.h"' $(TEST_SOURCES))
CARD_TESTS := $(notdir $(basename $(filter tests/test_cuda_%,$(filter-out $(STAND_IN_TESTS),$(TEST_SOURCES)))))
ifeq ($(CUDA_MODE),emulate)
LIBRARY_SOURCES += $(wildcard tests/cuda/*.cpp tests/cuda/*.cu)
else
TEST_SOURCES := $(filter-out $(STAND_IN_TESTS), $(TEST_SOURCES))
endif
ifeq ($(MPI),0)
LIBRARY_SOURCES := $(filter-out comm/transport/transport_mpi.c, $(LIBRARY_SOURCES))
LINK := $(CC)
else
CFLAGS += -DHAVE_MPI
LINK := OMPI_CC=$(CC) $(MPICC)
endif

# Q hides a command behind a short line, V=1 shows it.
Q := $(if $(V),,@)
say = $(if $(V),,@echo '  $(1)')

objects   = $(patsubst %,$(BUILD)/obj/%.o,$(basename $(1)))
PROGRAMS := $(patsubst %,$(BUILD)/%,$(filter-out train,$(notdir $(basename $(PROGRAM_SOURCES)))))
TESTS    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(TEST_SOURCES))
LIBRARY  := $(BUILD)/libtandem.a

.PHONY: all
all: $(TRAIN) $(PROGRAMS) ## build ./train and the programs in build/
	@echo 'CUDA: $(CUDA_SAYS)'

$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(dir $@)
	$(call say,cc    $<)
	$(Q)$(COMPILE) $(CFLAGS) $(if $(filter $(KERNELS),$<),$(KERNEL_CFLAGS)) -c $< -o $@
# Not CC itself: given on the command line, that overrides a target's own value.
COMPILE := $(CC)
$(BUILD)/obj/comm/transport/transport_mpi.o: COMPILE := OMPI_CC=$(CC) $(MPICC)

$(BUILD)/obj/%.o: %.cu $(BUILD)/flags.cuda
	@mkdir -p $(dir $@)
ifeq ($(CUDA_MODE),emulate)
	$(call say,c++   $<)
	$(Q)$(CXX) $(CXXFLAGS) -x c++ -c $< -o $@
else
	$(call say,nvcc  $<)
	$(Q)$(NVCC) $(NVCCFLAGS) $(if $(filter $(CUDA_EXACT),$<),-fmad=false) -MF $(@:.o=.d) -c $< -o $@
endif
$(BUILD)/obj/%.o: %.cpp $(BUILD)/flags.cuda
	@mkdir -p $(dir $@)
	$(call say,c++   $<)
	$(Q)$(CXX) $(CXXFLAGS) -c $< -o $@

# Rebuild everything when flags change.
$(BUILD)/flags: FLAGS = $(CC) $(CFLAGS) $(KERNEL_CFLAGS) $(LINK) $(LDLIBS)
$(BUILD)/flags.cuda: FLAGS = $(if $(filter emulate,$(CUDA_MODE)),$(CXX) $(CXXFLAGS),$(NVCC) $(NVCCFLAGS) $(CUDA_EXACT))
$(BUILD)/flags $(BUILD)/flags.cuda: FORCE
	@mkdir -p $(BUILD)
	@echo "$(FLAGS)" | cmp -s - $@ || echo "$(FLAGS)" > $@
FORCE:

$(LIBRARY): $(call objects,$(LIBRARY_SOURCES))
	@rm -f $@
	$(Q)ar rcs $@ $^

$(TRAIN): $(BUILD)/obj/train.o $(LIBRARY)
	$(call say,link  $@)
	$(Q)$(LINK) $^ $(LDLIBS) -o $@
define program
$(BUILD)/$(notdir $(basename $(1))): $(BUILD)/obj/$(1:.c=.o) $(LIBRARY)
	$$(call say,link  $$@)
	$$(Q)$$(LINK) $$^ $$(LDLIBS) -o $$@
endef
$(foreach source,$(filter-out train.c,$(PROGRAM_SOURCES)),$(eval $(call program,$(source))))
$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(LIBRARY)
	@mkdir -p $(dir $@)
	$(call say,link  $@)
	$(Q)$(LINK) $^ $(LDLIBS) -lcmocka -o $@
# These only: a .SECONDARY without names would hold for FORCE as well, and flags would never be looked at again.
.SECONDARY: $(call objects,$(TEST_SOURCES))

# ---- tests ----
.PHONY: test tests emulated asan tsan mutants lint
# What TEST needs, where it names some: a script needs the programs, and the test program of its name if there is one.
NEEDED := $(if $(TEST),$(if $(filter %.sh,$(TEST)),all) \
                       $(filter $(patsubst %,$(BUILD)/tests/%,$(TEST:.sh=)),$(TESTS)),all $(TESTS))
tests: $(NEEDED) $(BUILD)/card_tests
	@:
$(BUILD)/card_tests: FORCE
	@mkdir -p $(BUILD)
	@echo '$(CARD_TESTS)' > $@
# The tests of CUDA are built once more to run on the CPU, in a folder of their own.
EMULATED := $(if $(filter-out 0 emulate,$(CUDA)),$(if $(TEST),$(findstring test_cuda,$(TEST)),all))
EMULATED_BUILD := $(if $(filter emulate,$(CUDA)),$(BUILD),$(if $(EMULATED),$(if $(CUDA_HEADERS),$(BUILD)/emulate,none)))
emulated: $(BUILD)/card_tests $(TRAIN) $(BUILD)/golden $(BUILD)/prepare $(BUILD)/gpu_rates \
          $(filter $(BUILD)/tests/test_cuda_%,$(NEEDED))
test: deps ## build and run every test (TEST="names" for some)
	@$(MAKE) --no-print-directory tests
	@$(if $(and $(EMULATED),$(CUDA_HEADERS)),$(MAKE) --no-print-directory CUDA=emulate \
	    BUILD=$(BUILD)/emulate TRAIN=$(BUILD)/emulate/train emulated)
	@BUILD=$(BUILD) TRAIN=$(TRAIN) MPI=$(MPI) EMULATED=$(EMULATED_BUILD) tests/run.sh $(TEST)
# What gcc warns of under sanitizers may not be there.
ASAN_QUIET := $(if $(findstring gcc,$(CC)),-Wno-maybe-uninitialized)
asan: ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer, ranks as threads
	@ASAN_OPTIONS=allocator_may_return_null=1 $(MAKE) --no-print-directory test MPI=0 \
	    CUDA=$(if $(filter-out 0,$(CUDA)),$(if $(CUDA_HEADERS),emulate,0),0) \
	    BUILD=build/asan TRAIN=build/asan/train OPT=-O1 \
	    EXTRA_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer $(ASAN_QUIET)"
# The comm room needs neither OpenMP nor BLAS, whose threads ThreadSanitizer cannot follow.
TSAN_TESTS := test_comm test_transport test_collective test_sync test_shard test_feedback test_requantise \
              test_topk_feedback
TSAN_CFLAGS := -fsanitize=thread -DFEWER_CASES -Wno-unknown-pragmas -Wno-unused-parameter
tsan: ## the tests of comm under ThreadSanitizer, ranks as threads
	@$(MAKE) --no-print-directory MPI=0 CUDA=0 BUILD=build/tsan OPENMP= OPT=-O1 EXTRA_CFLAGS="$(TSAN_CFLAGS)" \
	    $(patsubst %,build/tsan/tests/%,$(or $(TEST),$(TSAN_TESTS)))
	@BUILD=build/tsan MPI=0 tests/run.sh $(or $(TEST),$(TSAN_TESTS))
mutants: ## put known faults back, one at a time, and see the tests catch each (FAULT="names" for some; ETA shown)
	@MAKE=$(MAKE) tests/mutants.sh $(FAULT)
lint: ## check who includes whom
	@tests/lint.sh

# ---- data and demo ----
PACKAGES := gcc make pkg-config libopenblas-dev libhwloc-dev libinih-dev libcjson-dev libpcre2-dev zlib1g-dev \
            libcmocka-dev $(if $(filter 0,$(MPI)),,libopenmpi-dev openmpi-bin iproute2 procps)
.PHONY: deps data demo accuracy
deps: ## install what is missing, by apt-get as root or with sudo
	@missing=$$(for p in $(PACKAGES); do \
	    [ "$$(dpkg-query -W -f='$${db:Status-Status}' $$p 2>/dev/null)" = installed ] || echo $$p; done); \
	[ -z "$$missing" ] && exit 0; \
	[ $$(id -u) = 0 ] && sudo= || sudo=sudo; \
	if ! command -v apt-get >/dev/null || { [ "$$sudo" ] && ! command -v sudo >/dev/null; }; then \
	    echo "missing packages:" $$missing; \
	    echo "install them as root, on Debian and Ubuntu by: apt-get install" $$missing; exit 1; fi; \
	echo "installing by apt-get, about a minute:" $$missing; \
	$$sudo apt-get update -qq && \
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null

data/text/.complete: $(BUILD)/extract_text
	@BUILD=$(BUILD) data/get_text.sh data/text && touch $@
data/prose_%_train_000000.bin: data/text/.complete $(BUILD)/prepare
	$(BUILD)/prepare --tokenizer $* --out data prose_$* data/text/*.txt
data: deps ## 25 MB of public-domain prose as token shards, for GPT-2's tokenizer and for bytes
	@$(MAKE) --no-print-directory data/prose_gpt2_train_000000.bin data/prose_bytes_train_000000.bin

# Open MPI refuses root unless told, and more ranks than cores (not hardware threads) unless told.
MPIRUN := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe
demo: deps ## train a small GPT on two ranks for two minutes and show what it writes
	@$(MAKE) --no-print-directory all
	@$(MAKE) --no-print-directory data/prose_bytes_train_000000.bin
	@$(if $(filter 0,$(MPI)),./$(TRAIN) configs/demo.cfg loop.ranks=2,$(MPIRUN) -n 2 ./$(TRAIN) configs/demo.cfg)
accuracy: deps ## what each compressor costs in loss: a table and a plot in out/accuracy (10 to 40 minutes, resumable)
	@$(MAKE) --no-print-directory all
	@$(MAKE) --no-print-directory data/prose_bytes_train_000000.bin
	@TRAIN=$(TRAIN) bench/accuracy $(if $(CI),--short)

# ---- measurements ----
.PHONY: speedup
speedup: deps ## the speed-up of every idea on an emulated cluster of 2 x 4 ranks: out/speedup, 9 minutes
	@$(MAKE) --no-print-directory BUILD=build TRAIN=train all
	@bench/speedup

.PHONY: clean help
clean: ## remove what was built
	rm -rf $(BUILD) $(TRAIN)
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

-include $(patsubst %.o,%.d,$(call objects,$(PROGRAM_SOURCES) $(LIBRARY_SOURCES) $(TEST_SOURCES)))
