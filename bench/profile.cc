// Profile of a training step: time by kernel class. CUDA loads this library into the unchanged program:
//
//   CUDA_INJECTION64_PATH=build/cuda/bench/libprofile.so build/cuda/train_moe ... --steps 12
//
// The library records every kernel, copy and fill (CUPTI activity records). At exit it prints, for the whole steps
// after the first two: time per step by class, the share of time in which the GPU was idle, and the host calls that
// can wait for the GPU.
//
// A kernel's time begins at its start. If it started before the previous kernel ended (PDL), its time begins at that
// end. Communication between GPUs counts as a whole; it is exposed while no other work runs. A step begins with the
// kernel step_begin (layers/step.cu).
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Record {
    uint64_t start, end;  // ns
    std::string name;
    uint64_t own;  // ns, the part of end - start that counts
};

std::mutex mutex;
std::vector<Record> work, calls;

// A part of a kernel's name, and its class. The first match is used.
const char* const classes[][2] = {
    {"grouped_gemm", "grouped GEMM"},
    {"plan_kernel", "grouped GEMM"},
    {"zero_without_rows", "grouped GEMM"},
    {"adamw", "optimizer"},
    {"sum_chunks", "optimizer"},
    {"add_total", "optimizer"},
    {"step_", "optimizer"},
    {"muon_", "optimizer"},
    {"permute", "permute, combine"},
    {"sort_", "permute, combine"},
    {"cross_entropy", "classifier's softmax"},
    {"rmsnorm", "norms"},
    {"swiglu", "SwiGLU"},
    {"experts_gate_backward", "SwiGLU"},
    {"attention", "attention"},
    {"rope_kernel", "rope"},
    {"embedding", "embedding"},
    {"draw_kernel", "weights at the start"},
    {"choose", "router"},
    {"score_backward", "router"},
    {"count_", "router"},
    {"add_halves", "router"},
    {"balance_", "router"},
    {"push_kernel", "all-to-all"},
    {"ranks_kernel", "all-to-all"},
    {"route_kernel", "all-to-all"},
    {"choices_", "all-to-all"},
    {"quantize_kernel", "quantization"},
    {"channels_kernel", "quantization"},
    {"both_kernel", "quantization"},
    {"tiles_kernel", "quantization"},
    {"round_kernel", "quantization"},
    {"stats_kernel", "quantization"},
    {"lines_kernel", "quantization"},
    {"blackwell_scales_kernel", "quantization"},
    {"memset", "copies and fills"},
    {"memcpy", "copies and fills"},
    {"gemm", "dense GEMM"},
    {"nvjet", "dense GEMM"},
    {"cutlass", "dense GEMM"},
    {"splitK", "dense GEMM"},
    {"xmma", "dense GEMM"},
};

bool is_transfer(const std::string& name) {
    return name.find("nccl") == 0 || name.find("push_kernel") != std::string::npos;
}

std::string class_of(const std::string& name) {
    if (name.find("ncclDevKernel_SendRecv") == 0) return "all-to-all";  // dispatch, combine, matrices of Muon
    if (name.find("nccl") == 0) return "gathers, reductions";
    for (auto& c : classes)
        if (name.find(c[0]) != std::string::npos) return c[1];
    return "other";
}

std::string demangled(const char* name) {
    int status;
    char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string out = status == 0 ? text : name;
    free(text);
    for (const char* noise : {"(anonymous namespace)::", "void "})
        while (out.find(noise) != std::string::npos) out.erase(out.find(noise), strlen(noise));
    return out.substr(0, out.find('('));
}

void CUPTIAPI request(uint8_t** buffer, size_t* size, size_t* most) {
    *size = 8 << 20;
    *buffer = (uint8_t*)aligned_alloc(8, *size);
    *most = 0;
}

void CUPTIAPI complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
    std::lock_guard<std::mutex> lock(mutex);
    CUpti_Activity* record = nullptr;
    while (valid && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        switch (record->kind) {
            // Work on the GPU.
            case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
                auto* k = (CUpti_ActivityKernel9*)record;
                work.push_back({k->start, k->end, demangled(k->name), 0});
                break;
            }
            case CUPTI_ACTIVITY_KIND_MEMCPY: {
                auto* c = (CUpti_ActivityMemcpy5*)record;
                work.push_back({c->start, c->end, "memcpy", 0});
                break;
            }
            case CUPTI_ACTIVITY_KIND_MEMSET: {
                auto* s = (CUpti_ActivityMemset4*)record;
                work.push_back({s->start, s->end, "memset", 0});
                break;
            }
            // Host calls that can wait or allocate.
            case CUPTI_ACTIVITY_KIND_RUNTIME: {
                auto* a = (CUpti_ActivityAPI*)record;
                const char* name = nullptr;
                cuptiGetCallbackName(CUPTI_CB_DOMAIN_RUNTIME_API, a->cbid, &name);
                if (name && (strstr(name, "Synchronize") || strncmp(name, "cudaMemcpy_v", 12) == 0 ||
                             strstr(name, "cudaMalloc")))
                    calls.push_back({a->start, a->end, name, 0});
                break;
            }
            default: break;
        }
    }
    free(buffer);
}

// Sets `own`. If kernels, copies or fills overlap, the time of each begins at the previous end. Transfers count fully.
void set_own() {
    std::vector<Record*> by_end;
    for (auto& r : work) by_end.push_back(&r);
    std::sort(by_end.begin(), by_end.end(), [](const Record* a, const Record* b) { return a->end < b->end; });
    uint64_t before = 0;
    for (Record* r : by_end) {
        r->own = r->end - r->start;
        if (is_transfer(r->name)) continue;
        r->own = r->end - std::max(r->start, before);
        before = r->end;
    }
}

// The exposed time of the transfers: no other work ran. By class; the key "" has the total. `work` is sorted by start.
std::map<std::string, double> exposed(uint64_t from, uint64_t to) {
    std::vector<std::pair<uint64_t, uint64_t>> busy;  // intervals with other work, merged
    for (auto& r : work) {
        if (is_transfer(r.name)) continue;
        if (!busy.empty() && r.start <= busy.back().second)
            busy.back().second = std::max(busy.back().second, r.end);
        else
            busy.push_back({r.start, r.end});
    }
    std::map<std::string, double> time;
    std::map<std::string, uint64_t> seen;  // the end of the time that is already counted for a class
    size_t first = 0;
    for (auto& r : work) {
        if (!is_transfer(r.name) || r.start < from || r.start >= to) continue;
        while (first < busy.size() && busy[first].second <= r.start) first++;
        for (const std::string& key : {class_of(r.name), std::string()}) {
            uint64_t at = std::max(r.start, seen[key]);
            for (size_t i = first; i < busy.size() && at < r.end; i++) {
                if (busy[i].first > at) time[key] += (double)(std::min(busy[i].first, r.end) - at);
                at = std::max(at, busy[i].second);
            }
            if (at < r.end) time[key] += (double)(r.end - at);
            seen[key] = std::max(seen[key], r.end);
        }
    }
    return time;
}

void report() {
    cuptiActivityFlushAll(1);
    std::sort(work.begin(), work.end(), [](const Record& a, const Record& b) { return a.start < b.start; });
    set_own();
    std::vector<uint64_t> begins;
    for (auto& r : work)
        if (r.name.find("step_begin") != std::string::npos) begins.push_back(r.start);
    if (begins.size() < 5) {
        printf("profile: fewer than 5 steps were recorded\n");
        return;
    }

    // Idle time, and the time by class and by kernel, from the third step to the start of the last one.
    uint64_t from = begins[2], to = begins.back(), busy_until = from, idle = 0;
    double steps = (double)begins.size() - 3, span = (double)(to - from);
    std::map<std::string, double> by_class;
    std::map<std::string, std::pair<double, int>> by_name, waits;
    for (auto& r : work) {
        if (r.start < from || r.start >= to) continue;
        if (r.start > busy_until) idle += r.start - busy_until;
        busy_until = std::max(busy_until, r.end);
        by_class[class_of(r.name)] += (double)r.own;
        by_name[r.name].first += (double)r.own;
        by_name[r.name].second++;
    }
    if (to > busy_until) idle += to - busy_until;
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && strcmp(rank, "0") != 0) return;

    // The tables of rank 0: classes, kernels, host calls.
    printf("\nprofile of %.0f steps: %.2f ms a step, GPU idle %.2f %%\n", steps, span / steps / 1e6,
           100 * (double)idle / span);
    auto alone = exposed(from, to);
    printf("transfers exposed: %.3f ms a step, %.2f %%\n", alone[""] / steps / 1e6, 100 * alone[""] / span);
    std::vector<std::pair<double, std::string>> sorted;
    for (auto& c : by_class) sorted.push_back({c.second, c.first});
    std::sort(sorted.rbegin(), sorted.rend());
    printf("| class | ms a step | share | of which exposed |\n|---|---|---|---|\n");
    for (auto& c : sorted) {
        printf("| %s | %.3f | %.1f %% | ", c.second.c_str(), c.first / steps / 1e6, 100 * c.first / span);
        if (alone.count(c.second)) printf("%.1f %% ", 100 * alone[c.second] / c.first);
        printf("|\n");
    }
    std::vector<std::pair<double, std::string>> kernels;
    for (auto& k : by_name) kernels.push_back({k.second.first, k.first});
    std::sort(kernels.rbegin(), kernels.rend());
    printf("\n| kernel | launches a step | ms a step |\n|---|---|---|\n");
    for (size_t i = 0; i < kernels.size() && i < 30; i++)
        printf("| %.90s | %.1f | %.3f |\n", kernels[i].second.c_str(), by_name[kernels[i].second].second / steps,
               kernels[i].first / steps / 1e6);
    for (auto& c : calls) {
        if (c.start < from || c.start >= to) continue;
        waits[c.name].first += (double)(c.end - c.start);
        waits[c.name].second++;
    }
    printf("\n| host call that can wait or allocate | calls a step | ms a step |\n|---|---|---|\n");
    for (auto& w : waits)
        printf("| %s | %.1f | %.3f |\n", w.first.c_str(), w.second.second / steps, w.second.first / steps / 1e6);
    fflush(stdout);
}

}  // namespace

// CUDA calls this function at its start if CUDA_INJECTION64_PATH names this library.
extern "C" __attribute__((visibility("default"))) int InitializeInjection(void) {
    cuptiActivityRegisterCallbacks(request, complete);
    for (CUpti_ActivityKind kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                    CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_RUNTIME})
        cuptiActivityEnable(kind);
    atexit(report);
    return 1;
}
