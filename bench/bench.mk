# The benchmarks. Yardsticks that need PyTorch are left out where it is not installed.
BENCH_CUDA = peaks attention grouped_gemm memory casts grouped_gemm_mx learn muon moe_layer
bench: all
	@$(if $(HAVE_GPU),$(MAKE) --no-print-directory $(BENCH_CUDA:%=$(CUDA)/bench/%))
	@$(PYTHON) bench/run.py $(CPU)/train_moe
	@$(if $(HAVE_GPU),for name in $(BENCH_CUDA); do echo "== $$name"; $(CUDA)/bench/$$name || exit 1; done)
	@$(if $(HAVE_GPU),for name in attention grouped_gemm muon moe_layer; do $(PYTHON) bench/$${name}_torch.py || true; done)

$(CUDA)/bench/%: CUDALIBS += $(subst cublasLt,cublas,$(filter -l%,$(CUBLAS)))
$(CUDA)/bench/%: $(CUDA)/bench/%.o $(CUDA_OBJECTS)
	$(link_cuda)
$(CUDA)/bench/learn: $(LEARN:%=$(CUDA)/%.o)
# Loaded into the program by CUDA_INJECTION64_PATH (bench/profile.cc).
$(CUDA)/bench/libprofile.so: bench/profile.cc Makefile
	$(call run,LINK ,$(NVCC) -std=c++17 -O2 -shared -Xcompiler -fPIC -I$(CUDA_HOME)/extras/CUPTI/include $< -o $@ \
	    -L$(CUDA_HOME)/extras/CUPTI/lib64 -lcupti)
-include $(wildcard $(CUDA)/bench/*.d $(CUDA)/learn/*.d)
