# train_moe: `make` builds, `make train` runs the first training, `make test` runs every test this machine can run.
# F64=1 builds the reference in double precision (build/f64), SANITIZE=1 adds address and undefined-behaviour checks,
# WERROR=1 turns warnings into errors.

# Every op: x.h is the contract, x.c the CPU reference, x.cu the CUDA kernels.
OPS = device/device \
      layers/embedding layers/rmsnorm layers/rope layers/linear layers/attention layers/swiglu layers/loss layers/adamw \
      moe/router moe/permute moe/grouped_gemm moe/experts

# Host code, the same source in both builds.
HOST = device/check device/random device/options device/arena device/files \
       data/json data/safetensors data/shards data/tokenizer data/runlog \
       layers/rope_table moe/moe \
       model/settings model/params model/forward model/backward model/model model/persist model/report model/sample \
       dist/checkpoint

# C tests; those in TESTS_F64 compare with finite differences and run in the double build too.
OP_TESTS = tests/test_layers tests/test_attention tests/test_adamw tests/test_router tests/test_moe
TESTS     = tests/test_device tests/test_data tests/test_shards $(OP_TESTS) tests/test_golden tests/test_model
TESTS_F64 = $(OP_TESTS) tests/test_golden tests/test_model

ifeq ($(origin CC),default)
CC = gcc
endif
PYTHON   ?= python3
JOBS     := $(shell nproc 2>/dev/null || echo 1)
CPPFLAGS  = -I. -MMD -MP -fPIC
# -fno-math-errno and -fno-trapping-math let loops with exp and comparisons vectorize; neither changes a result.
CFLAGS    = -std=gnu11 -O3 -g -march=native -fopenmp -fno-math-errno -fno-trapping-math -Wall -Wextra $(if $(WERROR),-Werror)
ifdef SANITIZE
SUFFIX    = -sanitize
CFLAGS   += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
endif
CBLAS_LIB := $(shell for l in "-lopenblas" "-lcblas -lblas" "-lcblas"; do \
    echo 'int main(void){return 0;}' | $(CC) -x c - -o /dev/null $$l 2>/dev/null && echo $$l && break; done)
LDLIBS    = $(CBLAS_LIB) -lz -lm -lpthread

NVCC     ?= nvcc
CUDA_HOME = $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
NVCCFLAGS = -std=c++17 -O3 -lineinfo -gencode=arch=compute_90a,code=sm_90a -I. -MMD -MP \
            -Xcompiler -Wall,-Wextra,-fopenmp,-Wno-unused-function,-Wno-unknown-pragmas $(if $(WERROR),-Werror all-warnings)
CUDALIBS  = -lcublasLt -lz -lgomp -lpthread -ldl

CPU    = build/cpu$(SUFFIX)
DOUBLE = build/f64$(SUFFIX)
CUDA   = build/cuda

HAVE_NVCC := $(shell command -v $(NVCC) 2>/dev/null)
HAVE_GPU  := $(if $(HAVE_NVCC),$(shell nvidia-smi -L 2>/dev/null | grep GPU))
# The backend that this machine can run.
RUNNABLE   = $(if $(HAVE_GPU),$(CUDA),$(CPU))

# Tests on the GPU: the kernels against the reference, and the model tests in the CUDA build.
TESTS_CUDA = $(patsubst %.cu,%,$(wildcard tests/test_cuda_*.cu)) tests/test_golden tests/test_model

.PHONY: all cpu cuda train test test-build cuda-test-build bench clean probe format print-host
all: probe cpu $(if $(HAVE_NVCC),cuda)
cpu: $(if $(F64),$(DOUBLE),$(CPU))/train_moe
cuda: $(CUDA)/train_moe

# One line for each thing a build can use.
probe:
	@CC="$(CC)" CBLAS_LIB="$(CBLAS_LIB)" sh scripts/probe.sh

# $(1): build folder, $(2): extra flags
define build
$(1)/%.o: %.c Makefile
	@mkdir -p $$(@D)
	@echo "  CC    $$@"
	@$(CC) $(CPPFLAGS) $$(CFLAGS) $(2) -c $$< -o $$@
$(1)/train_moe.o: train_moe.cu Makefile
	@mkdir -p $$(@D)
	@echo "  CC    $$@"
	@$(CC) $(CPPFLAGS) $$(CFLAGS) $(2) -x c -c $$< -o $$@
# The same seed gives the same weights on every machine: no fused multiply-adds there.
$(1)/device/random.o: CFLAGS += -ffp-contract=off
$(1)/train_moe: $(addprefix $(1)/,$(addsuffix .o,train_moe $(HOST) $(OPS)))
	@echo "  LINK  $$@"
	@$(CC) $(CFLAGS) $$^ -o $$@ $(LDLIBS)
$(1)/tests/%: $(1)/tests/%.o $(addprefix $(1)/,$(addsuffix .o,$(HOST) $(OPS)))
	@echo "  LINK  $$@"
	@$(CC) $(CFLAGS) $$^ -o $$@ $(LDLIBS)
# The reference alone, for the CUDA tests: its functions have the names that the kernels have.
$(1)/libreference.so: $(addprefix $(1)/,$(addsuffix .o,device/check device/random layers/rope_table $(OPS)))
	@echo "  LINK  $$@"
	@$(CC) $(CFLAGS) -shared -Wl,-Bsymbolic $$^ -o $$@ $(LDLIBS)
-include $(addprefix $(1)/,$(addsuffix .d,train_moe $(HOST) $(OPS) $(TESTS)))
endef
$(eval $(call build,$(CPU),))
$(eval $(call build,$(DOUBLE),-DF64))

# Ops are compiled from their .cu alone: one that is missing is an error, never the reference in its place.
CUDA_HOST = $(addprefix $(CUDA)/,$(HOST:=.o) tests/test_golden.o tests/test_model.o)
$(CUDA_HOST): $(CUDA)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  NVCC  $@"
	@$(NVCC) $(NVCCFLAGS) -x cu -c $< -o $@
$(CUDA)/%.o: %.cu Makefile
	@mkdir -p $(@D)
	@echo "  NVCC  $@"
	@$(NVCC) $(NVCCFLAGS) -c $< -o $@
$(CUDA)/device/random.o: NVCCFLAGS += -Xcompiler -ffp-contract=off
$(CUDA)/train_moe: $(addprefix $(CUDA)/,$(addsuffix .o,train_moe $(HOST) $(OPS)))
	@echo "  LINK  $@"
	@$(NVCC) $(NVCCFLAGS) $^ -o $@ $(CUDALIBS)
$(CUDA)/tests/%: $(CUDA)/tests/%.o $(addprefix $(CUDA)/,$(addsuffix .o,$(HOST) $(OPS)))
	@echo "  LINK  $@"
	@$(NVCC) $(NVCCFLAGS) $^ -o $@ $(CUDALIBS)
$(CUDA)/bench/%: $(CUDA)/bench/%.o $(addprefix $(CUDA)/,$(addsuffix .o,$(HOST) $(OPS)))
	@echo "  LINK  $@"
	@$(NVCC) $(NVCCFLAGS) $^ -o $@ $(CUDALIBS) -lcublas
# Loaded into the program by CUDA_INJECTION64_PATH (bench/profile.cc).
$(CUDA)/bench/libprofile.so: bench/profile.cc Makefile
	@mkdir -p $(@D)
	@echo "  LINK  $@"
	@$(NVCC) -std=c++17 -O2 -shared -Xcompiler -fPIC -I$(CUDA_HOME)/extras/CUPTI/include $< -o $@ \
	    -L$(CUDA_HOME)/extras/CUPTI/lib64 -lcupti
-include $(addprefix $(CUDA)/,$(addsuffix .d,train_moe $(HOST) $(OPS)))
.SECONDARY:

train:
	@sh scripts/setup.sh
	@$(MAKE) --no-print-directory -j$(JOBS) probe $(RUNNABLE)/train_moe
	@sh scripts/first_run.sh $(RUNNABLE)/train_moe

test:
	@sh scripts/setup.sh
	@$(MAKE) --no-print-directory -j$(JOBS) probe test-build $(if $(HAVE_GPU),cuda-test-build)
	@$(PYTHON) tests/run.py --program $(CPU)/train_moe $(if $(HAVE_GPU),--program $(CUDA)/train_moe) \
	    $(TESTS:%=$(CPU)/%) $(TESTS_F64:%=$(DOUBLE)/%) $(TESTS_CUDA:%=$(if $(HAVE_GPU),,--skip )$(CUDA)/%)

test-build: $(CPU)/train_moe $(TESTS:%=$(CPU)/%) $(TESTS_F64:%=$(DOUBLE)/%)
cuda-test-build: $(CUDA)/train_moe $(DOUBLE)/libreference.so $(TESTS_CUDA:%=$(CUDA)/%)

# Yardsticks that need PyTorch are left out where it is not installed.
BENCH_CUDA = attention grouped_gemm memory
bench: all $(if $(HAVE_GPU),$(BENCH_CUDA:%=$(CUDA)/bench/%))
	@$(PYTHON) bench/run.py $(CPU)/train_moe
	@$(if $(HAVE_GPU),for name in $(BENCH_CUDA); do echo "== $$name"; $(CUDA)/bench/$$name || exit 1; done)
	@$(if $(HAVE_GPU),for name in attention grouped_gemm; do $(PYTHON) bench/$${name}_torch.py || true; done)

print-host:
	@echo $(HOST:=.c) train_moe.cu

clean:
	rm -rf build

format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu')
