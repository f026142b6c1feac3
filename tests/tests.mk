# The tests. A C test or a CUDA test (test_cuda_*.cu) is found by its name; the lists say where else it runs.
TESTS_C   := $(patsubst %.c,%,$(wildcard tests/*/test_*.c))
# Of several ranks: four, where there is an mpirun, in the CUDA build one a GPU. test_checkpoint runs on one rank too.
TESTS_RANKS      = $(filter tests/parallel/% tests/ops/test_comm tests/model/test_checkpoint,$(TESTS_C))
TESTS_RANKS_F64  = tests/parallel/test_expert_parallel
TESTS_CUDA_RANKS = tests/ops/test_comm tests/parallel/test_expert_parallel tests/parallel/test_layouts
TESTS            = tests/fuzz $(filter-out tests/parallel/% tests/ops/test_comm,$(TESTS_C))
# In the double build too: what compares with finite differences.
TESTS_F64        = $(filter-out tests/ops/test_device,$(filter tests/ops/% tests/mx/% tests/model/test_golden tests/model/test_model,$(TESTS)))
# On the GPU: the kernels against the reference, and C tests that run in either build.
TESTS_EITHER     = $(addprefix tests/model/test_,golden model mtp) $(addprefix tests/mx/test_,mx_block mx_check linear linear_dy)
TESTS_CUDA       = $(patsubst %.cu,%,$(wildcard tests/*/test_cuda_*.cu)) $(TESTS_EITHER)
# These measure times, or the free memory of a GPU: nothing else may run.
TEST_ALONE       = $(addprefix tests/ops/test_cuda_,late_blocks pool)
# Slow tests that rarely fail are in test-all: Python files with SLOW, and long tests of the double build. On a machine
# with a GPU, make test runs all.
TESTS_SLOW_F64   = tests/mx/test_mx_check tests/mx/test_linear tests/mx/test_mx_block
TESTS_FAST_F64   = $(filter-out $(TESTS_SLOW_F64),$(TESTS_F64))

run_tests = MPI=$(MPI) $(PYTHON) tests/run.py --program $(CPU)/train_moe $(if $(HAVE_GPU),--program $(CUDA)/train_moe)
test:
	@sh scripts/setup.sh
	@$(MAKE) --no-print-directory probe
	@$(MAKE) --no-print-directory -j$(JOBS) test-build $(if $(HAVE_GPU),cuda-test-build $(TESTS_SLOW_F64:%=$(DOUBLE)/%))
	@$(run_tests) --list-skipped build/skipped $(if $(HAVE_GPU),,--part fast) $(TESTS:%=$(CPU)/%) $(if $(HAVE_GPU),$(TESTS_F64:%=$(DOUBLE)/%),$(TESTS_FAST_F64:%=$(DOUBLE)/%)) \
	    $(foreach t,$(TESTS_CUDA),$(if $(HAVE_GPU),$(if $(filter $t,$(TEST_ALONE)),--alone),--skip) $(CUDA)/$t) \
	    $(TESTS_RANKS:%=--ranks 4 $(CPU)/%) $(TESTS_RANKS_F64:%=--ranks 4 $(DOUBLE)/%) \
	    $(TESTS_CUDA_RANKS:%=$(if $(HAVE_GPU),--ranks $(GPUS),--skip) $(CUDA)/%)
# On a machine with a GPU, make test has run the slow part.
test-all: test
	@$(if $(HAVE_GPU),:,$(MAKE) --no-print-directory test-slow)
test-slow:
	@$(MAKE) --no-print-directory -j$(JOBS) $(CPU)/train_moe $(TESTS_SLOW_F64:%=$(DOUBLE)/%)
	@$(run_tests) --part slow $(TESTS_SLOW_F64:%=$(DOUBLE)/%)
# Again the Python files of which make test skipped a test, after the packages that they need were installed.
test-skipped:
	@[ -e build/skipped ] || { echo "test-skipped: error: no build/skipped: run make test first" >&2; exit 1; }
	@if [ -s build/skipped ]; then $(run_tests) $$(cat build/skipped); else echo "make test skipped no Python test"; fi
test-build: $(CPU)/train_moe $(CPU)/tests/model/libtorture.so $(addprefix $(CPU)/,$(TESTS) $(TESTS_RANKS)) \
            $(addprefix $(DOUBLE)/,$(TESTS_FAST_F64) $(TESTS_RANKS_F64))
cuda-test-build: $(CUDA)/train_moe $(CUDA)/learn/train_moe $(DOUBLE)/libreference.so $(addprefix $(CUDA)/,$(TESTS_CUDA) $(TESTS_CUDA_RANKS))

# tests/fuzz.c replaces these functions of the program.
FUZZ_WRAP = $(patsubst %,-Wl$(COMMA)--wrap=%,die warn calloc free)

# $(1): build folder
define build_tests
$(1)/tests/%: $(1)/tests/%.o $(addprefix $(1)/,$(addsuffix .o,$(HOST) $(OPS)) libraries)
	$$(call run,LINK ,$$(CC) $$(FLAGS) $$(filter %.o,$$^) -o $$@ $$(LDLIBS) $$(WRAP))
$(1)/tests/fuzz: WRAP = $(FUZZ_WRAP)
$(1)/tests/model/libtorture.so: tests/model/torture_preload.c Makefile
	$$(call run,LINK ,$$(CC) -std=gnu11 -O2 -g -fPIC -Wall -Wextra $$(if $$(WERROR),-Werror) -shared $$< -o $$@ -ldl)
# The reference alone, for the CUDA tests: its functions have the names that the kernels have.
$(1)/libreference.so: $(addprefix $(1)/,$(addsuffix .o,device/check layers/rope_table $(filter-out parallel/comm,$(OPS))))
	$$(call run,LINK ,$$(CC) $$(FLAGS) -shared -Wl$$(COMMA)-Bsymbolic $$^ -o $$@ $$(LDLIBS))
-include $(addprefix $(1)/,$(addsuffix .d,$(TESTS) $(TESTS_RANKS)))
endef
$(eval $(call build_tests,$(CPU)))
$(eval $(call build_tests,$(DOUBLE)))

$(CUDA)/tests/%: $(CUDA)/tests/%.o $(CUDA_OBJECTS)
	$(link_cuda)
$(CUDA)/tests/ops/test_cuda_learn: $(LEARN:%=$(CUDA)/%.o)
-include $(wildcard $(CUDA)/tests/*/*.d)

# Host code is C11 for gcc and C++20 for nvcc: it must stay in the common subset.
check-host:
	@for file in $(HOST:=.c) device/version.c train_moe.cu; do \
	    g++ -x c++ -std=c++20 $(HOST_WARNINGS) -Werror $(filter -I%,$(INCLUDES)) $(MPI_FLAGS) -DCOMMIT='""' -fsyntax-only $$file || exit 1; \
	done

# SECONDS of random inputs for each reader of files and options. Needs clang and its libFuzzer (libclang-rt-14-dev).
SECONDS = 60
FUZZ_CC = clang -std=gnu11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined
fuzz: build/fuzz/fuzz
	@for target in json safetensors tokenizer tokenizer-words options; do \
	    echo "== $$target" && mkdir -p build/fuzz/$$target && build/fuzz/fuzz -max_total_time=$(SECONDS) -close_fd_mask=1 \
	        -timeout=20 -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/$$target- build/fuzz/$$target || exit 1; \
	done
build/fuzz/fuzz: $(addsuffix .c,tests/fuzz $(subst ranks_mpi,ranks_one,$(HOST)) $(OPS)) $(wildcard */*.h) Makefile
	$(call run,CC   ,$(FUZZ_CC) -D_GNU_SOURCE -DLIBFUZZER $(filter -I%,$(INCLUDES)) -Wno-unknown-pragmas $(filter %.c,$^) -o $@ $(CBLAS_LIB) $(ZLIB) -lgomp -lm $(FUZZ_WRAP))

# Random KILLS, failing calls (FAILS) and DAMAGES of short runs, from SEED.
KILLS = 2000
FAILS = 1000
DAMAGES = 1000
SEED = 1
torture: $(CPU)/train_moe $(CPU)/tests/model/libtorture.so
	@TRAIN_MOE=$(CPU)/train_moe $(PYTHON) tests/model/test_torture.py --kills $(KILLS) --fails $(FAILS) --damages $(DAMAGES) --seed $(SEED)
