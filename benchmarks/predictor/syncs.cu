// What waiting between streams, copies of a few bytes and launches cost, in streams and in a captured graph.
//
//     nvcc -O2 -o syncs syncs.cu && ./syncs > syncs.csv
//
// Kernels spin for some microseconds on every SM with as many threads as fit, so that no two of them overlap: what a pattern
// takes beyond its kernels in one stream is the price of its waits. Median of 21 runs of 200 patterns, microseconds each.
//   series   three kernels in one stream
//   ping     the same, every kernel in the other stream, waiting for the one before: 3 waits
//   diamond  one kernel, then two beside each other in two streams, joined: 2 waits
//   to, from series, and a copy of 16 bytes to the host or from it
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                     \
    do {                                                                                \
        cudaError_t problem = (call);                                                   \
        if (problem != cudaSuccess) {                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(problem));            \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

__global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

static cudaStream_t streams[2];
static std::vector<cudaEvent_t> events;
static size_t next_event;
static float *host, *near_data;
static int blocks;

static void kernel(int stream, long long cycles) { spin<<<blocks, 1024, 0, streams[stream]>>>(cycles); }

static void wait(int waiting, int for_stream) {
    cudaEvent_t event = events[next_event++ % events.size()];
    CHECK(cudaEventRecord(event, streams[for_stream]));
    CHECK(cudaStreamWaitEvent(streams[waiting], event, 0));
}

static void pattern(const char *name, long long cycles, int index) {
    if (!strcmp(name, "ping")) {
        for (int step = 0; step < 3; step++) {
            int mine = (index * 3 + step) % 2;
            wait(mine, 1 - mine);
            kernel(mine, cycles);
        }
        return;
    }
    kernel(0, cycles);
    if (!strcmp(name, "diamond")) {
        wait(1, 0);
        kernel(1, cycles);
        kernel(0, cycles);
        wait(0, 1);
        return;
    }
    kernel(0, cycles);
    kernel(0, cycles);
    if (!strcmp(name, "to")) CHECK(cudaMemcpyAsync(host, near_data, 16, cudaMemcpyDeviceToHost, streams[0]));
    if (!strcmp(name, "from")) CHECK(cudaMemcpyAsync(near_data, host, 16, cudaMemcpyHostToDevice, streams[0]));
}

static void run(const char *name, long long cycles) {
    wait(1, 0);
    for (int index = 0; index < 200; index++) pattern(name, cycles, index);
    wait(0, 1);
}

static void measure(const char *name, long long cycles, double spin_us, bool graph) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    cudaGraphExec_t exec = nullptr;
    if (graph) {
        cudaGraph_t captured;
        CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
        run(name, cycles);
        CHECK(cudaStreamEndCapture(streams[0], &captured));
        CHECK(cudaGraphInstantiate(&exec, captured, 0));
        CHECK(cudaGraphDestroy(captured));
    }
    std::vector<float> times;
    for (int turn = 0; turn < 24; turn++) {
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(begin, streams[0]));
        if (graph)
            CHECK(cudaGraphLaunch(exec, streams[0]));
        else
            run(name, cycles);
        CHECK(cudaEventRecord(end, streams[0]));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (turn >= 3) times.push_back(ms * 1e3f / 200);
    }
    std::sort(times.begin(), times.end());
    printf("%s,%s,%.1f,%.4f,%.4f,%.4f\n", name, graph ? "graph" : "streams", spin_us, times[times.size() / 2],
           times[2], times[times.size() - 3]);
    if (exec) CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
}

int main() {
    cudaDeviceProp gpu;
    int clock_khz = 0;
    CHECK(cudaGetDeviceProperties(&gpu, 0));
    CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0));
    blocks = gpu.multiProcessorCount * (gpu.maxThreadsPerMultiProcessor / 1024);
    for (auto &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    events.resize(4096);
    for (auto &event : events) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaMallocHost(&host, 4096));
    CHECK(cudaMalloc(&near_data, 4096));
    printf("# gpu: %s, compute capability %d.%d, %d SMs, %d MHz\n", gpu.name, gpu.major, gpu.minor,
           gpu.multiProcessorCount, clock_khz / 1000);
    printf("pattern,mode,spin_us,us,low_us,high_us\n");
    for (double spin_us : {0.0, 3.0, 10.0, 30.0})
        for (bool graph : {false, true})
            for (const char *name : {"series", "ping", "diamond", "to", "from"})
                measure(name, (long long)(spin_us * clock_khz / 1e3), spin_us, graph);
    return 0;
}
