# train_moe: `make` builds, `make train` runs the first training, `make test` runs every test this machine can run.
# F64=1 builds the reference in double precision (build/f64), SANITIZE=1 adds address and undefined-behaviour checks,
# WERROR=1 turns warnings into errors, MPI=0 leaves Open MPI out, ONIG=0 Oniguruma. ARCHS: the GPUs that the CUDA build
# has code for, as compute capabilities ("80 90"), or all. The default: those of this machine, or all without a GPU.

COMMA = ,

# Every op: x.h is the contract, x.c the CPU reference, x.cu the CUDA kernels.
OPS = device/device device/graph \
      layers/embedding layers/rmsnorm layers/rope layers/matmul layers/attention layers/swiglu layers/loss layers/step layers/adamw layers/muon \
      moe/router moe/balance grouped/permute grouped/grouped_gemm grouped/experts moe/dispatch_ops mx/mxfp8 mx/mx_swiglu \
      mx/mx_stats mx/grouped_gemm_mx parallel/comm
# Portable kernels of ops, for other GPUs than Hopper: in the CUDA build alone.
OPS_LT = mx/grouped_gemm_blackwell grouped/grouped_gemm_portable
# The kernels of docs/cuda.md: only in their test and their benchmark.
LEARN = $(patsubst %.cu,%,$(wildcard learn/*.cu))

# Host code, the same source in both builds.
HOST = device/check device/random device/kernels device/options device/arena device/pool device/files device/threads \
       data/json data/safetensors data/shards data/vocab $(SPLIT) data/bpe data/tokenizer_json \
       data/tokenizer data/choices data/runlog \
       layers/rope_table mx/rows mx/linear mx/mx_check moe/dispatch moe/moe moe/moe_buffers \
       model/settings model/settings_check model/settings_read model/record model/hub model/agree model/params model/block model/block_forward \
       model/block_backward model/mtp model/passes model/model model/step model/update model/update_muon model/persist model/report \
       pretrained/export pretrained/import pretrained/evaluate pretrained/sample pretrained/use $(RANKS) \
       parallel/launch parallel/watch parallel/sharding parallel/slices parallel/checkpoint parallel/resume parallel/folder

# Open MPI connects the ranks; without it every program is one rank, and nothing else changes.
ifndef MPI
MPI := $(if $(shell mpicc --showme:version 2>/dev/null),1,0)
endif
ifeq ($(MPI),0)
RANKS = parallel/ranks_one
else
RANKS = parallel/ranks_mpi
# Without MPI's C++ interface, which host code in the CUDA build would get.
MPI_FLAGS := $(filter -I% -D%,$(shell mpicc --showme:compile)) -DOMPI_SKIP_MPICXX
MPI_LIBS  := $(filter-out -pthread,$(shell mpicc --showme:link))
endif

# Oniguruma cuts prompts into words for the tokenizers of a tokenizer.json; without it they can only decode.
ifndef ONIG
ONIG := $(if $(shell printf '\043include <oniguruma.h>\n' | $(CC) -E -x c - >/dev/null 2>&1 && echo 1),1,0)
endif
ifeq ($(ONIG),0)
SPLIT = data/split_none
else
SPLIT = data/split_onig
ONIG_LIBS = -lonig
endif

# C tests; those in TESTS_F64 compare with finite differences and run in the double build too.
OP_TESTS = $(addprefix tests/ops/test_,embedding matmul rmsnorm rope attention swiglu loss step adamw muon moments router balance permute grouped_gemm experts dispatch moe) \
           $(addprefix tests/mx/test_,mxfp8 mx_swiglu mx_stats mx_block mx_check mx_wgrad linear linear_dy)
TESTS     = tests/ops/test_device $(addprefix tests/data/test_,data bpe) tests/fuzz tests/data/test_shards $(OP_TESTS) \
            $(addprefix tests/model/test_,golden model mtp sample checkpoint)
# Tests of several ranks: four, where there is an mpirun, in the CUDA build one a GPU.
TESTS_RANKS = tests/parallel/test_ranks tests/ops/test_comm tests/model/test_checkpoint \
              $(addprefix tests/parallel/test_,expert_parallel layouts)
TESTS_F64 = $(OP_TESTS) tests/model/test_golden tests/model/test_model
TESTS_RANKS_F64 = tests/parallel/test_expert_parallel

ifeq ($(origin CC),default)
CC = gcc
endif
PYTHON   ?= python3
JOBS     := $(shell nproc 2>/dev/null || echo 1)
# _GNU_SOURCE: nvcc defines it too.
CPPFLAGS  = -I. -D_GNU_SOURCE -MMD -MP -fPIC
# -fno-math-errno and -fno-trapping-math let loops with exp and comparisons vectorize; neither changes a result.
CFLAGS    = -std=gnu11 -O3 -g -march=native -fopenmp -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-unused-parameter $(if $(WERROR),-Werror)
ifdef SANITIZE
SUFFIX    = -sanitize
CFLAGS   += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
endif
CBLAS_LIB := $(shell for l in "-lopenblas" "-lcblas -lblas" "-lcblas"; do \
    echo 'int main(void){return 0;}' | $(CC) -x c - -o /dev/null $$l 2>/dev/null && echo $$l && break; done)
LDLIBS    = $(CBLAS_LIB) $(MPI_LIBS) $(ONIG_LIBS) -lz -lm -lpthread

NVCC     ?= nvcc
CUDA_HOME = $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
HAVE_NVCC := $(shell command -v $(NVCC) 2>/dev/null)
ALL_GPUS  := $(if $(HAVE_NVCC),$(shell nvidia-smi --query-gpu=index --format=csv$(COMMA)noheader 2>/dev/null | grep '^[0-9]'))
# The GPUs that CUDA shows; an empty CUDA_VISIBLE_DEVICES, or -1, hides all.
HAVE_GPU  := $(if $(filter undefined,$(origin CUDA_VISIBLE_DEVICES)),$(ALL_GPUS),$(if $(ALL_GPUS),$(filter-out -1,$(subst $(COMMA), ,$(CUDA_VISIBLE_DEVICES)))))
GPUS      := $(words $(HAVE_GPU))
# GPUs: A100; RTX 30 and A40; RTX 40 and L40; H100; B200; RTX 50. PTX, which drivers compile, for later ones.
ALL_ARCHS = 80 86 89 90 100 120
ifndef ARCHS
ARCHS := $(or $(if $(HAVE_GPU),$(shell nvidia-smi --query-gpu=compute_cap --format=csv$(COMMA)noheader | tr -d . | sort -u)),all)
endif
gpu_code  = $(foreach arch,$(patsubst 90,90a,$(1)),-gencode=arch=compute_$(arch)$(COMMA)code=sm_$(arch))
GPU_CODE  = $(if $(filter all,$(ARCHS)),$(call gpu_code,$(ALL_ARCHS)) -gencode=arch=compute_100$(COMMA)code=compute_100,$(call gpu_code,$(ARCHS)))
# Fields left out of an initialiser are zero and enums are numbers, as in C.
HOST_WARNINGS = -Wall -Wextra -Wno-unused-parameter -Wno-unknown-pragmas -Wno-missing-field-initializers -Wno-deprecated-enum-enum-conversion \
                -Wno-deprecated-enum-float-conversion
NVCCFLAGS = -std=c++20 -O3 -lineinfo $(GPU_CODE) -I. -MMD -MP \
            $(HOST_WARNINGS:%=-Xcompiler %) -Xcompiler -fopenmp,-Wno-unused-function $(if $(WERROR),-Werror all-warnings)
CUDALIBS  = -lcublasLt -lnccl $(patsubst -Wl$(COMMA)%,-Xlinker %,$(MPI_LIBS)) $(ONIG_LIBS) -lz -lgomp -lpthread -ldl

CPU    = build/cpu$(SUFFIX)
DOUBLE = build/f64$(SUFFIX)
CUDA   = build/cuda

# The backend that this machine can run.
RUNNABLE   = $(if $(HAVE_GPU),$(CUDA),$(CPU))

# Tests on the GPU: the kernels against the reference, and C tests that run in either build.
TESTS_EITHER = $(addprefix tests/model/test_,golden model mtp) $(addprefix tests/mx/test_,mx_block mx_check linear linear_dy)
TESTS_CUDA = $(patsubst %.cu,%,$(wildcard tests/*/test_cuda_*.cu)) $(TESTS_EITHER)
# This one measures times: nothing else may run.
TEST_ALONE = tests/ops/test_cuda_late_blocks
TESTS_CUDA_RANKS = tests/ops/test_comm tests/parallel/test_expert_parallel tests/parallel/test_layouts

.PHONY: FORCE help all cpu cuda train test test-all test-build cuda-test-build bench docs fuzz torture clean probe format check-host
# The probe's lines come before the compiler's, also with -j.
all: probe
	@$(MAKE) --no-print-directory cpu $(if $(HAVE_NVCC),cuda)
cpu: $(if $(F64),$(DOUBLE),$(CPU))/train_moe
cuda: $(CUDA)/train_moe

help:
	@echo "make           build for the CPU, and for the GPU where there is nvcc"
	@echo "make cpu       build/cpu/train_moe alone"
	@echo "make cuda      build/cuda/train_moe alone"
	@echo "make train     install what is missing, train a small model, print a sample, plot"
	@echo "make test      the tests that this machine can run, in minutes; make test-all: the slow ones too"
	@echo "make bench     speed of the program and its kernels, beside PyTorch where it is installed"
	@echo "make docs      draw the figures of docs/ again"
	@echo "make clean     remove build/"

# One line for each library or tool that a build can use.
probe:
	@CC="$(CC)" CBLAS_LIB="$(CBLAS_LIB)" MPI="$(MPI)" ONIG="$(ONIG)" sh scripts/probe.sh

# The optional libraries of a folder's binaries: these are linked again when it changes.
build/%/libraries: FORCE
	@mkdir -p $(@D)
	@echo "$(RANKS) $(SPLIT)" | cmp -s - $@ || echo "$(RANKS) $(SPLIT)" > $@

# tests/fuzz.c replaces these functions of the program.
FUZZ_WRAP = $(patsubst %,-Wl$(COMMA)--wrap=%,die warn calloc free)

# The commit, for device/version.o alone. A source tree without git has none.
COMMIT = $(or $(if $(wildcard .git),$(shell git describe --always --dirty 2>/dev/null)),unknown)
build/%/commit: FORCE
	@mkdir -p $(@D)
	@echo "$(COMMIT)" | cmp -s - $@ || echo "$(COMMIT)" > $@

# $(1): build folder, $(2): extra flags
define build
$(1)/%.o: %.c Makefile
	@mkdir -p $$(@D)
	@echo "  CC    $$@"
	@$(CC) $$(CPPFLAGS) $$(CFLAGS) $(2) -c $$< -o $$@
$(1)/train_moe.o: train_moe.cu Makefile
	@mkdir -p $$(@D)
	@echo "  CC    $$@"
	@$(CC) $(CPPFLAGS) $$(CFLAGS) $(2) -x c -c $$< -o $$@
# The same seed gives the same weights on every machine: no fused multiply-adds there.
$(1)/device/random.o: CFLAGS += -ffp-contract=off
$(1)/parallel/ranks_mpi.o: CFLAGS += $(MPI_FLAGS)
$(1)/device/version.o: CPPFLAGS += -DCOMMIT='"$$(COMMIT)"'
$(1)/device/version.o: $(1)/commit
$(1)/train_moe: $(addprefix $(1)/,$(addsuffix .o,train_moe device/version $(HOST) $(OPS)) libraries)
	@echo "  LINK  $$@"
	@$(CC) $(CFLAGS) $$(filter %.o,$$^) -o $$@ $(LDLIBS)
$(1)/tests/%: $(1)/tests/%.o $(addprefix $(1)/,$(addsuffix .o,$(HOST) $(OPS)) libraries)
	@echo "  LINK  $$@"
	@$(CC) $(CFLAGS) $$(filter %.o,$$^) -o $$@ $(LDLIBS) $$(WRAP)
$(1)/tests/fuzz: WRAP = $(FUZZ_WRAP)
$(1)/tests/model/libtorture.so: tests/model/torture_preload.c Makefile
	@mkdir -p $$(@D)
	@echo "  LINK  $$@"
	@$(CC) -std=gnu11 -O2 -g -fPIC -Wall -Wextra $(if $(WERROR),-Werror) -shared $$< -o $$@ -ldl
# The reference alone, for the CUDA tests: its functions have the names that the kernels have.
$(1)/libreference.so: $(addprefix $(1)/,$(addsuffix .o,device/check device/random layers/rope_table \
                        $(filter-out parallel/comm,$(OPS))))
	@echo "  LINK  $$@"
	@$(CC) $(CFLAGS) -shared -Wl,-Bsymbolic $$^ -o $$@ $(LDLIBS)
-include $(addprefix $(1)/,$(addsuffix .d,train_moe device/version $(HOST) $(OPS) $(TESTS) $(TESTS_RANKS)))
endef
$(eval $(call build,$(CPU),))
$(eval $(call build,$(DOUBLE),-DF64))

# Its objects are compiled again when ARCHS changes.
$(CUDA)/archs: FORCE
	@mkdir -p $(@D)
	@echo "$(GPU_CODE)" | cmp -s - $@ || echo "$(GPU_CODE)" > $@

# Hopper's kernels, and files without kernels. private: $(CUDA)/archs, which they depend on, keeps the whole list.
HOPPER = $(addprefix $(CUDA)/,$(addsuffix .o,grouped/grouped_gemm mx/grouped_gemm_mx learn/grouped_gemm_4 learn/grouped_gemm_5))
$(HOPPER): private GPU_CODE = $(call gpu_code,90)

# Ops are compiled from their .cu alone: one that is missing is an error, never the reference in its place.
CUDA_HOST = $(addprefix $(CUDA)/,$(addsuffix .o,device/version $(HOST) $(TESTS_EITHER) $(TESTS_CUDA_RANKS)))
$(CUDA_HOST) $(CUDA)/train_moe.o: private GPU_CODE = $(call gpu_code,80)
$(CUDA_HOST): $(CUDA)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  NVCC  $@"
	@$(NVCC) $(NVCCFLAGS) -x cu -c $< -o $@
$(CUDA)/%.o: %.cu Makefile $(CUDA)/archs
	@mkdir -p $(@D)
	@echo "  NVCC  $@"
	@$(NVCC) $(NVCCFLAGS) -c $< -o $@
$(CUDA)/device/random.o: NVCCFLAGS += -Xcompiler -ffp-contract=off
$(CUDA)/parallel/ranks_mpi.o: NVCCFLAGS += $(MPI_FLAGS)
$(CUDA)/device/version.o: NVCCFLAGS += -DCOMMIT='"$(COMMIT)"'
$(CUDA)/device/version.o: $(CUDA)/commit
$(CUDA)/train_moe: $(addprefix $(CUDA)/,$(addsuffix .o,train_moe device/version $(HOST) $(OPS) $(OPS_LT)) libraries)
	@echo "  LINK  $@"
	@$(NVCC) $(NVCCFLAGS) $(filter %.o,$^) -o $@ $(CUDALIBS)
$(CUDA)/tests/%: $(CUDA)/tests/%.o $(addprefix $(CUDA)/,$(addsuffix .o,$(HOST) $(OPS) $(OPS_LT)) libraries)
	@echo "  LINK  $@"
	@$(NVCC) $(NVCCFLAGS) $(filter %.o,$^) -o $@ $(CUDALIBS)
$(CUDA)/bench/%: $(CUDA)/bench/%.o $(addprefix $(CUDA)/,$(addsuffix .o,$(HOST) $(OPS) $(OPS_LT)) libraries)
	@echo "  LINK  $@"
	@$(NVCC) $(NVCCFLAGS) $(filter %.o,$^) -o $@ $(CUDALIBS) -lcublas
$(CUDA)/tests/ops/test_cuda_learn $(CUDA)/bench/learn: $(LEARN:%=$(CUDA)/%.o)
# Loaded into the program by CUDA_INJECTION64_PATH (bench/profile.cc).
$(CUDA)/bench/libprofile.so: bench/profile.cc Makefile
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	@$(NVCC) -std=c++17 -O2 -shared -Xcompiler -fPIC -I$(CUDA_HOME)/extras/CUPTI/include $< -o $@ \
	    -L$(CUDA_HOME)/extras/CUPTI/lib64 -lcupti
-include $(addprefix $(CUDA)/,$(addsuffix .d,train_moe device/version $(HOST) $(OPS) $(OPS_LT))) $(wildcard $(CUDA)/tests/*/*.d $(CUDA)/bench/*.d $(CUDA)/learn/*.d)
.SECONDARY:

train:
	@sh scripts/setup.sh
	@$(MAKE) --no-print-directory probe
	@$(MAKE) --no-print-directory -j$(JOBS) $(RUNNABLE)/train_moe
	@sh scripts/first_run.sh $(RUNNABLE)/train_moe

# Slow tests that rarely fail are in test-all: Python files with SLOW, and long tests of the double build. On a machine
# with a GPU, make test runs all.
TESTS_SLOW_F64 = tests/mx/test_mx_check tests/mx/test_linear tests/mx/test_mx_block
run_tests = MPI=$(MPI) $(PYTHON) tests/run.py --program $(CPU)/train_moe $(if $(HAVE_GPU),--program $(CUDA)/train_moe)
test:
	@sh scripts/setup.sh
	@$(MAKE) --no-print-directory probe
	@$(MAKE) --no-print-directory -j$(JOBS) test-build $(if $(HAVE_GPU),cuda-test-build)
	@$(run_tests) $(if $(HAVE_GPU),,--part fast) $(TESTS:%=$(CPU)/%) \
	    $(patsubst %,$(DOUBLE)/%,$(if $(HAVE_GPU),$(TESTS_F64),$(filter-out $(TESTS_SLOW_F64),$(TESTS_F64)))) \
	    $(foreach t,$(TESTS_CUDA),$(if $(HAVE_GPU),$(if $(filter $t,$(TEST_ALONE)),--alone),--skip) $(CUDA)/$t) \
	    $(TESTS_RANKS:%=--ranks 4 $(CPU)/%) $(TESTS_RANKS_F64:%=--ranks 4 $(DOUBLE)/%) \
	    $(TESTS_CUDA_RANKS:%=$(if $(HAVE_GPU),--ranks $(GPUS),--skip) $(CUDA)/%)
test-all: test
	@$(if $(HAVE_GPU),:,$(MAKE) --no-print-directory -j$(JOBS) $(TESTS_SLOW_F64:%=$(DOUBLE)/%) && \
	    $(run_tests) --part slow $(TESTS_SLOW_F64:%=$(DOUBLE)/%))

test-build: $(CPU)/train_moe $(CPU)/tests/model/libtorture.so $(CPU)/tests/data/encode $(addprefix $(CPU)/,$(TESTS) $(TESTS_RANKS)) $(addprefix $(DOUBLE)/,$(if $(HAVE_GPU),$(TESTS_F64),$(filter-out $(TESTS_SLOW_F64),$(TESTS_F64))) $(TESTS_RANKS_F64))
cuda-test-build: $(CUDA)/train_moe $(DOUBLE)/libreference.so $(addprefix $(CUDA)/,$(TESTS_CUDA) $(TESTS_CUDA_RANKS))

# SECONDS of random inputs for each reader of files and options. Needs clang and its libFuzzer (libclang-rt-14-dev).
SECONDS = 60
FUZZ_CC = clang -std=gnu11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined
fuzz: build/fuzz/fuzz
	@for target in json safetensors tokenizer tokenizer.json options; do \
	    echo "== $$target" && mkdir -p build/fuzz/$$target && build/fuzz/fuzz -max_total_time=$(SECONDS) -close_fd_mask=1 \
	        -timeout=20 -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/$$target- build/fuzz/$$target || exit 1; \
	done
build/fuzz/fuzz: $(addsuffix .c,tests/fuzz $(subst split_onig,split_none,$(subst ranks_mpi,ranks_one,$(HOST))) $(OPS)) $(wildcard */*.h) Makefile
	@mkdir -p $(@D)
	@echo "  CC    $@"
	@$(FUZZ_CC) -D_GNU_SOURCE -DLIBFUZZER -I. -Wno-unknown-pragmas $(filter %.c,$^) -o $@ $(CBLAS_LIB) -lgomp -lz -lm $(FUZZ_WRAP)

# Random KILLS, failing calls (FAILS) and DAMAGES of short runs, from SEED.
KILLS = 2000
FAILS = 1000
DAMAGES = 1000
SEED = 1
torture: $(CPU)/train_moe $(CPU)/tests/model/libtorture.so
	@TRAIN_MOE=$(CPU)/train_moe $(PYTHON) tests/model/test_torture.py --kills $(KILLS) --fails $(FAILS) --damages $(DAMAGES) --seed $(SEED)

# Yardsticks that need PyTorch are left out where it is not installed.
BENCH_CUDA = attention grouped_gemm memory casts grouped_gemm_mx learn muon
bench: all $(if $(HAVE_GPU),$(BENCH_CUDA:%=$(CUDA)/bench/%))
	@$(PYTHON) bench/run.py $(CPU)/train_moe
	@$(if $(HAVE_GPU),for name in $(BENCH_CUDA); do echo "== $$name"; $(CUDA)/bench/$$name || exit 1; done)
	@$(if $(HAVE_GPU),for name in attention grouped_gemm muon; do $(PYTHON) bench/$${name}_torch.py || true; done)

# The figures of docs/, some from runs of `tiny`: three minutes on two cores.
docs: $(CPU)/train_moe
	@$(PYTHON) scripts/figures.py --program $(CPU)/train_moe

# Host code is C11 for gcc and C++20 for nvcc: it must stay in the common subset.
check-host:
	@for file in $(HOST:=.c) device/version.c train_moe.cu; do \
	    g++ -x c++ -std=c++20 $(HOST_WARNINGS) -Werror -I. $(MPI_FLAGS) -DCOMMIT='""' -fsyntax-only $$file || exit 1; \
	done

clean:
	rm -rf build

format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')
