# tandem. `make help` lists the targets. Needs GNU make, a C11 compiler and the libraries that `make deps` installs.
#
#   MPI=0          leave MPI out: ranks are threads of one process
#   ARCH=x86-64-v3 compile for other machines than this one (default: native)
#   BUILD=folder   where objects and programs go (default: build)
#   V=1            show the commands

MPI   ?= 1
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

# Programs with a main of their own, everything else is in the library.
PROGRAM_SOURCES := train.c generate.c data/prepare.c data/tokenize.c data/extract_text.c $(wildcard bench/*.c) tests/golden.c
TEST_SOURCES    := $(wildcard tests/test_*.c)
LIBRARY_SOURCES := $(filter-out $(PROGRAM_SOURCES), $(wildcard base/*.c data/*.c model/*.c optim/*.c comm/*.c comm/*/*.c run/*.c))
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

objects   = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))
PROGRAMS := $(patsubst %,$(BUILD)/%,$(filter-out train,$(notdir $(basename $(PROGRAM_SOURCES)))))
TESTS    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(TEST_SOURCES))
LIBRARY  := $(BUILD)/libtandem.a

.PHONY: all
all: $(TRAIN) $(PROGRAMS) ## build ./train and the programs in build/

$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(dir $@)
	$(call say,cc    $<)
	$(Q)$(COMPILE) $(CFLAGS) $(if $(filter $(KERNELS),$<),$(KERNEL_CFLAGS)) -c $< -o $@
# Not CC itself: given on the command line, that overrides a target's own value.
COMPILE := $(CC)
$(BUILD)/obj/comm/transport/transport_mpi.o: COMPILE := OMPI_CC=$(CC) $(MPICC)

# Rebuild everything when flags change.
$(BUILD)/flags: FORCE
	@mkdir -p $(BUILD)
	@echo '$(CC) $(CFLAGS) $(KERNEL_CFLAGS) $(LINK) $(LDLIBS)' | cmp -s - $@ || echo '$(CC) $(CFLAGS) $(KERNEL_CFLAGS) $(LINK) $(LDLIBS)' > $@
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
.PHONY: test tests asan tsan mutants lint
tests: all $(TESTS)
test: deps ## build and run every test (TEST="names" for some)
	@$(MAKE) --no-print-directory tests
	@BUILD=$(BUILD) TRAIN=$(TRAIN) MPI=$(MPI) tests/run.sh $(TEST)
asan: ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer, ranks as threads
	@ASAN_OPTIONS=allocator_may_return_null=1 $(MAKE) --no-print-directory test MPI=0 BUILD=build/asan TRAIN=build/asan/train OPT=-O1 \
	    EXTRA_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# The comm room needs neither OpenMP nor BLAS, whose threads ThreadSanitizer cannot follow.
TSAN_TESTS := test_comm test_transport test_collective test_sync test_shard test_feedback
TSAN_CFLAGS := -fsanitize=thread -DFEWER_CASES -Wno-unknown-pragmas -Wno-unused-parameter
tsan: ## the tests of comm under ThreadSanitizer, ranks as threads
	@$(MAKE) --no-print-directory MPI=0 BUILD=build/tsan OPENMP= OPT=-O1 EXTRA_CFLAGS="$(TSAN_CFLAGS)" \
	    $(TSAN_TESTS:%=build/tsan/tests/%)
	@BUILD=build/tsan MPI=0 tests/run.sh $(TSAN_TESTS)
mutants: ## put known faults back, one at a time, and see the tests catch each (about ten minutes)
	@tests/mutants.sh
lint: ## check who includes whom
	@tests/lint.sh

# ---- data and demo ----
PACKAGES := gcc make pkg-config libopenblas-dev libhwloc-dev libinih-dev libcjson-dev libpcre2-dev zlib1g-dev \
            libcmocka-dev $(if $(filter 0,$(MPI)),,libopenmpi-dev openmpi-bin)
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
accuracy: deps ## what each compressor costs in loss: a table and a plot in out/accuracy (under two hours, resumable)
	@$(MAKE) --no-print-directory all
	@$(MAKE) --no-print-directory data/prose_bytes_train_000000.bin
	@TRAIN=$(TRAIN) bench/accuracy $(if $(CI),--short)

# ---- measurements ----
.PHONY: speedup
speedup: deps ## the speed-up of every idea on an emulated cluster of 2 x 4 ranks: table and plot in out/speedup, 8 minutes
	@$(MAKE) --no-print-directory BUILD=build TRAIN=train all
	@bench/speedup

.PHONY: clean help
clean: ## remove what was built
	rm -rf $(BUILD) $(TRAIN)
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

-include $(patsubst %.c,$(BUILD)/obj/%.d,$(PROGRAM_SOURCES) $(LIBRARY_SOURCES) $(TEST_SOURCES))
