// A CUDA device that computes nothing: its memory is the host's, its kernels return at once, its events tell the time of
// the host. Preloaded, it takes the place of the CUDA runtime, the driver, cuBLAS and NCCL. build.sh adds functions that
// only succeed for everything else that PyTorch calls. NULL_GPU_CAPABILITY is its compute capability (90: Hopper).
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#undef cudaGetDeviceProperties
#define TOTAL ((size_t)143771 << 20)
#define DONE return cudaSuccess

// Memory: pages that the host has only once something is written, zero before.

typedef struct Block {
    char *start;
    size_t bytes;
    enum cudaMemoryType type;
    struct Block *next;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t used;

static cudaError_t take(void **place, size_t bytes, enum cudaMemoryType type) {
    cudaError_t error = cudaErrorMemoryAllocation;
    bytes = bytes ? bytes : 1;
    pthread_mutex_lock(&lock);
    if (type == cudaMemoryTypeHost || used + bytes <= TOTAL) {
        void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        Block *block = start == MAP_FAILED ? NULL : malloc(sizeof *block);
        if (block) {
            *block = (Block){start, bytes, type, blocks};
            blocks = block;
            used += type == cudaMemoryTypeDevice ? bytes : 0;
            *place = start;
            error = cudaSuccess;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static cudaError_t give(void *start) {
    pthread_mutex_lock(&lock);
    for (Block **each = &blocks; *each; each = &(*each)->next) {
        Block *block = *each;
        if (block->start == start) {
            used -= block->type == cudaMemoryTypeDevice ? block->bytes : 0;
            munmap(start, block->bytes);
            *each = block->next;
            free(block);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    DONE;
}

static enum cudaMemoryType type_of(const void *place) {
    enum cudaMemoryType type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (Block *each = blocks; each && type == cudaMemoryTypeUnregistered; each = each->next)
        if ((char *)place >= each->start && (char *)place < each->start + each->bytes) type = each->type;
    pthread_mutex_unlock(&lock);
    return type;
}

cudaError_t cudaMalloc(void **p, size_t n) { return take(p, n, cudaMemoryTypeDevice); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { return take(p, n, cudaMemoryTypeHost); }
cudaError_t cudaFree(void *p) { return give(p); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return give(p); }
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { return cudaMalloc(p, 1 << 16); }
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) { *total = TOTAL, *left = TOTAL - used; DONE; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) {
    *found = (struct cudaPointerAttributes){.type = type_of(p), .devicePointer = (void *)p, .hostPointer = (void *)p};
    DONE;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) { memmove(to, from, n); DONE; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    return cudaMemcpy(to, from, n, kind);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t n, cudaStream_t s) {
    return cudaMemcpy(to, from, n, cudaMemcpyDeviceToDevice);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t s) {
    for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (char *)from + row * pitch, width);
    DONE;
}
cudaError_t cudaMemset(void *p, int value, size_t n) { memset(p, value, n); DONE; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { return cudaMemset(p, value, n); }

// The device.

static int capability(void) {
    const char *given = getenv("NULL_GPU_CAPABILITY");
    return given ? atoi(given) : 90;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    *p = (struct cudaDeviceProp){
        .name = "NVIDIA H200", .totalGlobalMem = TOTAL, .major = capability() / 10, .minor = capability() % 10,
        .multiProcessorCount = 132, .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535},
        .sharedMemPerBlock = 48 << 10, .sharedMemPerBlockOptin = 227 << 10, .sharedMemPerMultiprocessor = 228 << 10,
        .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .l2CacheSize = 60 << 20, .memoryBusWidth = 6144,
        .textureAlignment = 512, .unifiedAddressing = 1, .concurrentKernels = 1, .asyncEngineCount = 3,
        .canMapHostMemory = 1, .managedMemory = 1,
    };
    DONE;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr asked, int device) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    switch (asked) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: *value = 1; break;
    default: *value = 0;
    }
    DONE;
}
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; DONE; }
cudaError_t cudaGetDevice(int *device) { *device = 0; DONE; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int here, int there) { *can = 0; DONE; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device) { snprintf(id, bytes, "0000:01:00.0"); DONE; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (cudaMemPool_t)8; DONE; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -5; DONE; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; DONE; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; DONE; }
const char *cudaGetErrorName(cudaError_t error) { return "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "error"; }

// Streams, in which everything is done when it is begun, and events.

typedef struct timespec Event;

static cudaError_t event(cudaEvent_t *e) { *e = calloc(1, sizeof(Event)); DONE; }

cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = malloc(1); DONE; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { return cudaStreamCreate(s); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; DONE; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    DONE;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    if (id) *id = 0;
    return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *with, unsigned flags) {
    call(s, cudaSuccess, with);
    DONE;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *with) { call(with); DONE; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return event(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return event(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); DONE; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { clock_gettime(CLOCK_MONOTONIC, (Event *)e); DONE; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    Event *a = (Event *)from, *b = (Event *)to;
    *ms = (b->tv_sec - a->tv_sec) * 1e3f + (b->tv_nsec - a->tv_nsec) * 1e-6f;
    DONE;
}

// Kernels: known by their host functions, launched by a function that only succeeds.

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;

void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    DONE;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; DONE; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = capability(),
                                         .binaryVersion = capability(), .maxDynamicSharedSizeBytes = 48 << 10};
    DONE;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads, size_t shared) {
    *blocks = 2;
    DONE;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    DONE;
}

// The driver.

static long succeed(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *found = (void *)succeed;
    if (result) *result = cudaDriverEntryPointSuccess;
    DONE;
}
CUresult cuDeviceGet(CUdevice *device, int number) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)8; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

// cuBLAS: one way to multiply, which needs no workspace.

int cublasCreate_v2(void **handle) { *handle = malloc(64); return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = malloc(256); return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = malloc(256); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long long rows, unsigned long long columns, long long ld) {
    *made = malloc(256);
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int most, void *results, int *found) {
    memset(results, 0, 8 * sizeof(long) + 40);  // sizeof(cublasLtMatmulHeuristicResult_t)
    *found = 1;
    return 0;
}

// NCCL, of communicators of one rank.

static size_t bytes_of(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }
static int copy(void *to, const void *from, size_t count, int type) { memmove(to, from, count * bytes_of(type)); return 0; }

int ncclGetVersion(int *version) { *version = 22809; return 0; }
const char *ncclGetErrorString(int error) { return "no error"; }
const char *ncclGetLastError(void *c) { return ""; }
int ncclCommInitRankConfig(void **c, int ranks, ...) { *c = malloc(1); return 0; }
int ncclCommInitRankScalable(void **c, int ranks, ...) { *c = malloc(1); return 0; }
int ncclCommSplit(void *c, int color, int key, void **split, void *config) { *split = malloc(1); return 0; }
int ncclCommGetAsyncError(void *c, int *error) { *error = 0; return 0; }
int ncclCommCount(void *c, int *ranks) { *ranks = 1; return 0; }
int ncclCommUserRank(void *c, int *rank) { *rank = 0; return 0; }
int ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n); }
int ncclMemFree(void *p) { return give(p); }
int ncclAllReduce(void *from, void *to, size_t n, int type, int op, void *c, void *s) { return copy(to, from, n, type); }
int ncclBroadcast(void *from, void *to, size_t n, int type, int root, void *c, void *s) { return copy(to, from, n, type); }
int ncclReduce(void *from, void *to, size_t n, int type, int op, int root, void *c, void *s) {
    return copy(to, from, n, type);
}
int ncclAllGather(void *from, void *to, size_t n, int type, void *c, void *s) { return copy(to, from, n, type); }
int ncclReduceScatter(void *from, void *to, size_t n, int type, int op, void *c, void *s) {
    return copy(to, from, n, type);
}
