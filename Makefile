# train_moe: `make` builds, `make train` runs the first training, `make test` runs every test this machine can run.
# F64=1 builds the reference in double precision (build/f64), SANITIZE=1 adds address and undefined-behaviour checks,
# WERROR=1 turns warnings into errors, MPI=0 leaves Open MPI out. ARCHS: the GPUs that the CUDA build has code for, as
# compute capabilities ("80 90"), or all. The default: those of this machine, or all without a GPU.

COMMA = ,
# Before other programs that are asked something: none of them may hang a build.
LIMIT := $(if $(shell command -v timeout),timeout -k 1 10)

# --- Files ---
# An op is three files: x.h the contract, x.c the CPU reference, x.cu the CUDA kernels. A .cu without a .c has further
# kernels of an op, for other GPUs. All other .c are host code, one source for both builds. An op without its .cu is an
# error of the CUDA build (device/cpu.h). One without its .c is an error of the link in the CPU build.
FOLDERS = device data layers grouped mx linear moe model parallel pretrained
C_FILES := $(patsubst %.c,%,$(wildcard $(FOLDERS:%=%/*.c)))
KERNELS := $(patsubst %.cu,%,$(wildcard $(FOLDERS:%=%/*.cu)))
OPS     := $(filter $(KERNELS),$(C_FILES))
HOST     = $(filter-out $(OPS) device/version parallel/ranks_%,$(C_FILES)) $(RANKS)
# The kernels of docs/cuda.md: only in their test and their benchmark.
LEARN   := $(patsubst %.cu,%,$(filter-out learn/train_moe.cu,$(wildcard learn/*.cu)))

# --- Libraries ---
ifeq ($(origin CC),default)
CC = gcc
endif
PYTHON   ?= python3
# pip's nvidia-* packages: folders with include, lib and perhaps bin/nvcc.
PIP      := $(wildcard $(addsuffix /*,$(shell $(LIMIT) $(PYTHON) -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null)))
NVCC     := $(or $(NVCC),$(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc)) $(shell command -v nvcc) $(wildcard $(PIP:%=%/bin/nvcc)) nvcc))
HAVE_NVCC := $(shell command -v $(NVCC) 2>/dev/null)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(HAVE_NVCC)))
find      = $(shell CC="$(CC)" CUDA_HOME="$(CUDA_HOME)" PIP="$(PIP)" sh scripts/find.sh $(1))
CBLAS_LIB := $(call find,openblas cblas.h openblas "cblas blas" cblas)
ZLIB      := $(call find,zlib zlib.h z)
NCCL      := $(if $(HAVE_NVCC),$(call find,nccl nccl.h nccl))
CUBLAS    := $(if $(HAVE_NVCC),$(call find,cublas cublasLt.h cublasLt))
# Open MPI connects the ranks; without it every program is one rank, and nothing else changes.
MPI       := $(or $(MPI),$(if $(shell $(LIMIT) mpicc --showme:version 2>/dev/null),1,0))
ifeq ($(MPI),0)
RANKS = parallel/ranks_one
else
RANKS = parallel/ranks_mpi
# Without MPI's C++ interface, which host code in the CUDA build would get.
MPI_FLAGS := $(filter -I% -D%,$(shell $(LIMIT) mpicc --showme:compile)) -DOMPI_SKIP_MPICXX
MPI_LIBS  := $(filter-out -pthread,$(shell $(LIMIT) mpicc --showme:link))
endif

# --- Compilers ---
JOBS     := $(shell nproc 2>/dev/null || echo 1)
# CPPFLAGS, CFLAGS and NVCCFLAGS may be given on the command line. OWN: flags of one object.
CPPFLAGS  =
OWN       =
CFLAGS    = -O3 -g -march=native
# _GNU_SOURCE: nvcc defines it too.
INCLUDES  = -I. -D_GNU_SOURCE -MMD -MP -fPIC $(filter -I%,$(CBLAS_LIB) $(ZLIB))
# -fno-math-errno and -fno-trapping-math let loops with exp and comparisons vectorize; neither changes a result.
FLAGS     = -std=gnu11 -fopenmp -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-unused-parameter $(if $(WERROR),-Werror) $(SANITIZER) $(CFLAGS)
SUFFIX    =
SANITIZER =
ifdef SANITIZE
SUFFIX    = -sanitize
SANITIZER = -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
endif
LDLIBS    = $(CBLAS_LIB) $(MPI_LIBS) $(ZLIB) -lm -lpthread

# $(1): what nvidia-smi is asked, once, where a goal needs it. Only numbers count, as old drivers answer with [N/A] or an error.
smi = $(shell { $(LIMIT) nvidia-smi --query-gpu=$(1) --format=csv$(COMMA)noheader 2>/dev/null; \
              code=$$?; [ $$code != 124 ] && [ $$code != 137 ] || echo "make: nvidia-smi does not answer: this machine's GPUs are not known" >&2; } | grep -xE '[0-9]+(\.[0-9]+)?')
ALL_GPUS  = $(eval ALL_GPUS := $(if $(HAVE_NVCC),$(call smi,index)))$(ALL_GPUS)
# The GPUs that CUDA shows; an empty CUDA_VISIBLE_DEVICES, or -1, hides all.
HAVE_GPU  = $(if $(filter undefined,$(origin CUDA_VISIBLE_DEVICES)),$(ALL_GPUS),$(if $(ALL_GPUS),$(filter-out -1,$(subst $(COMMA), ,$(CUDA_VISIBLE_DEVICES)))))
GPUS      = $(words $(HAVE_GPU))
# GPUs: A100; RTX 30 and A40; RTX 40 and L40; H100; B200; RTX 50. PTX, which drivers compile, for later ones.
ALL_ARCHS = 80 86 89 90 100 120
ifndef ARCHS
ARCHS = $(eval ARCHS := $(or $(if $(HAVE_GPU),$(sort $(subst .,,$(call smi,compute_cap)))),all))$(ARCHS)
endif
gpu_code  = $(foreach arch,$(patsubst 90,90a,$(1)),-gencode=arch=compute_$(arch)$(COMMA)code=sm_$(arch))
GPU_CODE  = $(if $(filter all,$(ARCHS)),$(call gpu_code,$(ALL_ARCHS)) -gencode=arch=compute_100$(COMMA)code=compute_100,$(call gpu_code,$(ARCHS)))
# Fields left out of an initialiser are zero and enums are numbers, as in C.
HOST_WARNINGS = -Wall -Wextra -Wno-unused-parameter -Wno-unknown-pragmas -Wno-missing-field-initializers -Wno-deprecated-enum-enum-conversion \
                -Wno-deprecated-enum-float-conversion
NVCCFLAGS = -O3 -lineinfo
CUDAFLAGS = -std=c++20 $(GPU_CODE) -I. -MMD -MP $(filter -I%,$(NCCL) $(CUBLAS) $(ZLIB)) \
            $(HOST_WARNINGS:%=-Xcompiler %) -Xcompiler -fopenmp,-Wno-unused-function $(if $(WERROR),-Werror all-warnings) $(NVCCFLAGS)
CUDALIBS  = $(patsubst -Wl$(COMMA)%,-Xlinker %,$(NCCL) $(CUBLAS) $(MPI_LIBS) $(ZLIB)) -lgomp -lpthread -ldl

# --- Targets ---
CPU    = build/cpu$(SUFFIX)
DOUBLE = build/f64$(SUFFIX)
CUDA   = build/cuda
# What this machine can run.
RUNNABLE = $(if $(HAVE_GPU),$(CUDA),$(CPU))

.PHONY: FORCE help all cpu cuda train sheet sheet-cuda test test-all test-slow test-skipped test-build cuda-test-build bench docs fuzz torture clean probe format check-host
# The probe's lines come before the compiler's, also with -j.
all: probe
	@$(MAKE) --no-print-directory cpu $(if $(HAVE_NVCC),cuda)
cpu: $(if $(F64),$(DOUBLE),$(CPU))/train_moe
cuda: $(CUDA)/train_moe

help:
	@echo "make           build for the CPU, and for the GPU where there is nvcc"
	@echo "make cpu       build/cpu/train_moe alone; make cuda: build/cuda/train_moe alone"
	@echo "make train     install what is missing, train a small model, print a sample, plot"
	@echo "make sheet     the same training by learn/train_moe.c, the whole algorithm in one file; make sheet-cuda: by the .cu"
	@echo "make test      the tests that this machine can run, in minutes; make test-all: the slow ones too"
	@echo "make bench     speed of the program and its kernels, beside PyTorch where it is installed"
	@echo "make docs      draw the figures of docs/ again"
	@echo "make clean     remove build/"

train:
	@sh scripts/setup.sh
	@$(MAKE) --no-print-directory probe
	@$(MAKE) --no-print-directory -j$(JOBS) $(RUNNABLE)/train_moe
	@sh scripts/first_run.sh $(RUNNABLE)/train_moe

sheet:
	@CC="$(CC)" PYTHON="$(PYTHON)" sh scripts/sheet.sh
# SMALL='TRAIN.bin ... VAL.bin', and options before them, train `small`; else `tiny` trains on the text of `make train`.
sheet-cuda: $(CUDA)/learn/train_moe
ifdef SMALL
	$< small $(SMALL)
else
	@$(PYTHON) scripts/prepare_text.py data/repository.txt.xz --split-on '<|endoftext|>' --out runs/corpus --name repository \
	    --val-fraction 0.1 --overwrite
	$< tiny runs/corpus/repository_train_000000.bin runs/corpus/repository_val_000000.bin
endif

# One line for each library or tool that a build can use.
probe:
	@$(foreach v,HAVE_NVCC NCCL CUBLAS CBLAS_LIB ZLIB MPI,$v="$($v)") sh scripts/probe.sh

# The figures of docs/, some from runs of `tiny`: three minutes on two cores.
docs: $(CPU)/train_moe
	@$(PYTHON) scripts/figures.py --program $(CPU)/train_moe
clean:
	rm -rf build
format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

# --- Rules ---
# Files that are written only when their contents change: what depends on them is then made again.
stamp = @mkdir -p $(@D); echo '$(1)' | cmp -s - $@ || echo '$(1)' > $@
build/%/libraries: FORCE
	$(call stamp,$(RANKS))
# For device/version.o alone, never the name of a tag. A source tree without git has none.
COMMIT = $(or $(if $(wildcard .git),$(shell $(LIMIT) git describe --always --dirty --exclude='*' 2>/dev/null)),unknown)
build/%/commit: FORCE
	$(call stamp,$(COMMIT))
$(CUDA)/archs: FORCE
	$(call stamp,$(GPU_CODE))

# $(1): what the line on the terminal says, $(2): the command
run = @mkdir -p $(@D); echo "  $(1) $@"; $(2)

# $(1): build folder, $(2): extra flags
define build
$(1)/%.o: %.c Makefile
	$$(call run,CC   ,$$(CC) $$(INCLUDES) $$(FLAGS) $$(OWN) $(2) $$(CPPFLAGS) -c $$< -o $$@)
$(1)/train_moe.o: train_moe.cu Makefile
	$$(call run,CC   ,$$(CC) $$(INCLUDES) $$(FLAGS) $(2) $$(CPPFLAGS) -x c -c $$< -o $$@)
# The same seed gives the same weights on every machine and backend: no fused multiply-adds there.
$(1)/layers/draw.o: OWN = -ffp-contract=off
$(1)/parallel/ranks_mpi.o: OWN = $(MPI_FLAGS)
$(1)/device/version.o: OWN = -DCOMMIT='"$$(COMMIT)"'
$(1)/device/version.o: $(1)/commit
$(1)/train_moe: $(addprefix $(1)/,$(addsuffix .o,train_moe device/version $(HOST) $(OPS)) libraries)
	$$(call run,LINK ,$$(CC) $$(FLAGS) $$(filter %.o,$$^) -o $$@ $$(LDLIBS))
-include $(addprefix $(1)/,$(addsuffix .d,train_moe device/version $(HOST) $(OPS)))
endef
$(eval $(call build,$(CPU),))
$(eval $(call build,$(DOUBLE),-DF64))

# Hopper's kernels, and files without kernels. private: $(CUDA)/archs, which they depend on, keeps the whole list.
HOPPER = $(addprefix $(CUDA)/,$(addsuffix .o,layers/attention grouped/grouped_gemm mx/grouped_gemm_mx learn/grouped_gemm_4 learn/grouped_gemm_5))
$(HOPPER): private GPU_CODE = $(call gpu_code,90)
CUDA_HOST = $(addprefix $(CUDA)/,$(addsuffix .o,device/version $(HOST) $(TESTS_EITHER) $(TESTS_CUDA_RANKS)))
$(CUDA)/%.o: %.cu Makefile $(CUDA)/archs
	$(call run,NVCC ,$(NVCC) $(CUDAFLAGS) $(OWN) -c $< -o $@)
$(CUDA)/layers/draw.o: OWN = --fmad=false
$(CUDA)/parallel/ranks_mpi.o: OWN = $(MPI_FLAGS)
$(CUDA)/device/version.o: OWN = -DCOMMIT='"$(COMMIT)"'
$(CUDA)/device/version.o: $(CUDA)/commit
CUDA_OBJECTS = $(addprefix $(CUDA)/,$(addsuffix .o,$(HOST) $(KERNELS)) libraries)
link_cuda = $(call run,LINK ,$(NVCC) $(CUDAFLAGS) $(filter %.o,$^) -o $@ $(CUDALIBS))
$(CUDA)/train_moe: $(CUDA)/train_moe.o $(CUDA)/device/version.o $(CUDA_OBJECTS)
	$(link_cuda)
-include $(addprefix $(CUDA)/,$(addsuffix .d,train_moe device/version $(HOST) $(KERNELS)))
# The sheet for GPUs is a program of its own.
$(CUDA)/learn/train_moe: learn/train_moe.cu Makefile $(CUDA)/archs
	$(call run,NVCC ,$(NVCC) -std=c++17 $(GPU_CODE) $(NVCCFLAGS) $< -o $@ $(patsubst -Wl$(COMMA)%,-Xlinker %,$(CUBLAS)) -lcublas)
.SECONDARY:

include tests/tests.mk bench/bench.mk

# After the tests' lists: host code, which is compiled for one GPU, as it has no kernels.
$(CUDA_HOST) $(CUDA)/train_moe.o: private GPU_CODE = $(call gpu_code,80)
$(CUDA_HOST): $(CUDA)/%.o: %.c Makefile
	$(call run,NVCC ,$(NVCC) $(CUDAFLAGS) $(OWN) -x cu -c $< -o $@)
