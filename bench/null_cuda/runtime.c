/* A CUDA runtime, cuBLAS and NCCL that do nothing: preloaded under a CUDA build of torch, they let it run on a machine
 * without a GPU, with its own allocator, autograd, streams and process groups.
 *
 * Nothing writes to memory of the "device", which is the host's: it holds zeros, and costs nothing. What is asked of the device
 * is recorded in the order of the calls; `null_records` returns it. See run.py. */

#define _GNU_SOURCE
/* The headers of half precision need some that no wheel has. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
typedef struct { unsigned short bits; } __half, __half2, __nv_bfloat16;
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* -- the record */

typedef struct {
    int64_t kind; /* 'K' kernel, 'B' cuBLAS, 'N' NCCL, 'C' copy, 'R' event recorded, 'W' wait for an event, 'S' the host waits */
    uint64_t stream;
    const char *name;
} Record;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Record *records;
static size_t count, capacity;
static void (*on_wait)(const char *);
static __thread uint64_t nccl_stream = UINT64_MAX;

static void add(char kind, const void *stream, const char *name) {
    pthread_mutex_lock(&lock);
    if (count == capacity)
        records = realloc(records, (capacity = 2 * capacity + 4096) * sizeof *records);
    records[count++] = (Record){kind, (uint64_t)stream, name};
    pthread_mutex_unlock(&lock);
}

static void host_waits(const char *how) {
    add('S', 0, how);
    if (on_wait)
        on_wait(how);
}

/* What was recorded since the last call of `null_clear`; valid until the next call of anything. */
const Record *null_records(size_t *n) { *n = count; return records; }
void null_clear(void) { pthread_mutex_lock(&lock); count = 0; pthread_mutex_unlock(&lock); }
/* `call` is called wherever the host waits for the device, in the thread that does. */
void null_on_wait(void (*call)(const char *)) { on_wait = call; }
/* The stream of this thread's last NCCL operation since the last call; all bits set: there was none. */
uint64_t null_nccl_stream(void) {
    uint64_t last = nccl_stream;
    nccl_stream = UINT64_MAX;
    return last;
}

/* A kernel that Python stands in for; `name` is kept. */
void null_kernel(const char *name, uint64_t stream) { add('K', (void *)stream, strdup(name)); }

/* -- the device */

static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}
static int capability(void) { return setting("NULL_CUDA_CAPABILITY", 90); }
static int processors(void) { return setting("NULL_CUDA_PROCESSORS", 132); }
static size_t memory(void) { return (size_t)setting("NULL_CUDA_GIB", 80) << 30; }

static __thread int device;

cudaError_t cudaGetDeviceCount(int *n) { *n = setting("NULL_CUDA_DEVICES", 8); return cudaSuccess; }
cudaError_t cudaGetDevice(int *d) { *d = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { device = d; return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned f) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int d) { snprintf(id, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int d) {
    switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = processors(); break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrMaxGridDimX: *value = INT32_MAX; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "no GPU, as of capability %d.%d", capability() / 10, capability() % 10);
    p->totalGlobalMem = memory();
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 64 << 10;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = INT32_MAX, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->multiProcessorCount = processors();
    p->l2CacheSize = 50 << 20;
    p->major = capability() / 10, p->minor = capability() % 10;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->asyncEngineCount = 1;
    p->pciBusID = d + 1;
    return cudaSuccess;
}

/* This library is the driver's too. */
enum { NOT_SUPPORTED = 801 };
static int no_driver(void) { return NOT_SUPPORTED; } /* for a function that is not here */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    *f = dlsym(RTLD_DEFAULT, name);
    if (!*f)
        *f = no_driver;
    if (found)
        *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
int cuDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetAttribute(int *v, int attribute, int d) { return cudaDeviceGetAttribute(v, attribute, d); }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int d) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuPointerGetAttribute(void **data, int attribute, void *p) { *data = p; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
/* Kernels that are compiled at run time, by torch from C++ or by Triton: a function is its name. */
int cuModuleLoad(void **module, const char *file) { *module = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **f, void *module, const char *name) { *f = strdup(name); return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuFuncGetAttribute(int *v, int attribute, void *f) {
    *v = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* most threads of a block; registers of a thread */
    return 0;
}
int cuFuncSetAttribute(void *f, int attribute, int v) { return 0; }
int cuFuncSetCacheConfig(void *f, int config) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared) { *n = 2; return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, const void *config) { *n = 1; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s,
                   void **args, void **extra) {
    add('K', s, f);
    return 0;
}
typedef struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned n; } Launch; /* CUlaunchConfig */
int cuLaunchKernelEx(const Launch *c, void *f, void **args, void **extra) { add('K', c->stream, f); return 0; }
#define NO_DRIVER(name) \
    int name(void) { return NOT_SUPPORTED; }
NO_DRIVER(cuGetErrorString)
NO_DRIVER(cuLaunchCooperativeKernel)
NO_DRIVER(cuLinkAddData_v2)
NO_DRIVER(cuLinkComplete)
NO_DRIVER(cuLinkCreate_v2)
NO_DRIVER(cuModuleLoadDataEx)
NO_DRIVER(cuCtxGetLimit)
NO_DRIVER(cuCtxSetLimit)
NO_DRIVER(cuTensorMapEncodeIm2col)

/* -- memory */

typedef struct { uintptr_t begin; size_t bytes; enum cudaMemoryType type; } Block;
static Block blocks[1 << 16];
static size_t n_blocks;
static size_t held; /* of the device's memory */

static void *allocate(size_t bytes, enum cudaMemoryType type) {
    bytes = bytes ? (bytes + 4095) / 4096 * 4096 : 4096;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    pthread_mutex_lock(&lock);
    if (n_blocks == sizeof blocks / sizeof *blocks)
        abort();
    blocks[n_blocks++] = (Block){(uintptr_t)p, bytes, type};
    pthread_mutex_unlock(&lock);
    return p;
}

static Block find(const void *p, int remove) {
    Block found = {0, 0, cudaMemoryTypeUnregistered};
    pthread_mutex_lock(&lock);
    for (size_t n = 0; n < n_blocks; n++)
        if ((uintptr_t)p >= blocks[n].begin && (uintptr_t)p < blocks[n].begin + blocks[n].bytes) {
            found = blocks[n];
            if (remove)
                blocks[n] = blocks[--n_blocks];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static size_t release(void *p) {
    Block block = find(p, 1);
    if (block.bytes)
        munmap((void *)block.begin, block.bytes);
    return block.bytes;
}

static int hold(size_t n) {
    if (__atomic_add_fetch(&held, n, __ATOMIC_RELAXED) <= memory())
        return 1;
    __atomic_sub_fetch(&held, n, __ATOMIC_RELAXED);
    return 0;
}

cudaError_t cudaMalloc(void **p, size_t n) {
    n = (n + 4095) / 4096 * 4096;
    if (!hold(n))
        return cudaErrorMemoryAllocation;
    *p = allocate(n, cudaMemoryTypeDevice);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    host_waits("cudaFree");
    __atomic_sub_fetch(&held, release(p), __ATOMIC_RELAXED);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) {
    *p = allocate(n, cudaMemoryTypeHost);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *p) { release(p); return cudaSuccess; }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) {
    pthread_mutex_lock(&lock);
    blocks[n_blocks++] = (Block){(uintptr_t)p, n, cudaMemoryTypeHost};
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) { find(p, 1); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *t = memory(); *f = *t - held; return cudaSuccess; }
/* What the expandable segments of torch's allocator are made of: addresses, and memory in pieces of 2 MiB behind them. */
enum { OUT_OF_MEMORY = 2 };
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int recommended) { *bytes = 2 << 20; return 0; }
int cuMemAddressReserve(void **p, size_t n, size_t alignment, void *wanted, unsigned long long flags) {
    *p = allocate(n, cudaMemoryTypeDevice);
    return *p ? 0 : OUT_OF_MEMORY;
}
int cuMemAddressFree(void *p, size_t n) { release(p); return 0; }
int cuMemCreate(size_t *piece, size_t n, const void *properties, unsigned long long flags) {
    *piece = n;
    return hold(n) ? 0 : OUT_OF_MEMORY;
}
int cuMemRelease(size_t piece) { __atomic_sub_fetch(&held, piece, __ATOMIC_RELAXED); return 0; }
int cuMemMap(void *p, size_t n, size_t offset, size_t piece, unsigned long long flags) { return 0; }
int cuMemSetAccess(void *p, size_t n, const void *access, size_t count) { return 0; }
int cuMemUnmap(void *p, size_t n) { return 0; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    *a = (struct cudaPointerAttributes){.type = find(p, 0).type, .devicePointer = (void *)p, .hostPointer = (void *)p};
    return cudaSuccess;
}

static void copy(void *to, const void *from, size_t n, cudaStream_t s) {
    enum cudaMemoryType a = find(from, 0).type, b = find(to, 0).type;
    int on_device = a == cudaMemoryTypeDevice && b == cudaMemoryTypeDevice;
    add('C', s, on_device ? "copy on the device" : b == cudaMemoryTypeDevice ? "upload" : "download");
    /* CUDA stages memory that is not pinned, and returns when it has. */
    if (n && (a == cudaMemoryTypeUnregistered || b == cudaMemoryTypeUnregistered))
        host_waits("a copy of host memory that is not pinned");
    if (b != cudaMemoryTypeDevice)
        memcpy(to, from, n);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    copy(to, from, n, s);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
    copy(to, from, n, 0);
    host_waits("cudaMemcpy");
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) {
    add('K', s, "memset");
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t n) { return cudaMemsetAsync(p, value, n, 0); }

/* -- streams and events: all work is done at once */

static void *handle(void) {
    static uintptr_t next = 0x1000;
    return (void *)__atomic_add_fetch(&next, 16, __ATOMIC_RELAXED);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0, *high = -5; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { host_waits("cudaStreamSynchronize"); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { host_waits("cudaDeviceSynchronize"); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { add('W', s, ""); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
    *c = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **n, const cudaGraphEdgeData **e, size_t *k) {
    *c = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = handle(); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = handle(); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { add('R', s, ""); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { host_waits("cudaEventSynchronize"); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }

/* -- kernels, by the names that they are registered with */

typedef struct { const void *function; const char *name; } Kernel;
enum { KERNELS = 1 << 20 };
static Kernel kernels[KERNELS];

static Kernel *kernel(const void *f) {
    size_t at = ((uintptr_t)f * 0x9E3779B97F4A7C15u) >> 44;
    while (kernels[at].function && kernels[at].function != f)
        at = (at + 1) % KERNELS;
    return &kernels[at];
}

void **__cudaRegisterFatBinary(void *binary) { return (void **)handle(); }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t size, int c, int g) {}
void __cudaRegisterFunction(void **h, const char *f, char *d, const char *name, int limit, void *t, void *b, void *bd, void *gd,
                            int *w) {
    *kernel(f) = (Kernel){f, name};
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration[8];
static __thread int configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration[configurations].grid = grid, configuration[configurations].block = block;
    configuration[configurations].shared = shared, configuration[configurations++].stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration[--configurations].grid, *block = configuration[configurations].block;
    *shared = configuration[configurations].shared, *(void **)stream = configuration[configurations].stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    const char *name = kernel(f)->name;
    add('K', s, name ? name : "unknown");
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return cudaLaunchKernel((const void *)k, grid, block, args, shared, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    return cudaLaunchKernel(f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = capability() / 10 * 10; /* which runs on later ones of the same major number */
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) {
    *n = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { return cudaMalloc(p, 4096); }

/* -- cuBLAS: a handle is the stream that it computes on */

#define MATMUL(name, ...)                                             \
    cublasStatus_t name(cublasHandle_t h, ##__VA_ARGS__) {            \
        add('B', *(void **)h, #name);                           \
        return CUBLAS_STATUS_SUCCESS;                                 \
    }

cublasStatus_t cublasCreate_v2(cublasHandle_t *h) { *h = calloc(1, sizeof(void *)); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) { *(void **)h = s; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *w, size_t n) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *m) { *m = CUBLAS_DEFAULT_MATH; return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *m) {
    *m = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetSmCountTarget(cublasHandle_t h, int n) { return CUBLAS_STATUS_SUCCESS; }
MATMUL(cublasSgemm_v2, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *al, const float *a, int la,
       const float *b, int lb, const float *be, float *c, int lc)
MATMUL(cublasSgemmStridedBatched, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *al, const float *a,
       int la, long long sa, const float *b, int lb, long long sb, const float *be, float *c, int lc, long long sc, int batch)
MATMUL(cublasGemmEx, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *al, const void *a, cudaDataType at,
       int la, const void *b, cudaDataType bt, int lb, const void *be, void *c, cudaDataType ct, int lc, cublasComputeType_t compute,
       cublasGemmAlgo_t algorithm)
MATMUL(cublasGemmStridedBatchedEx, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *al, const void *a,
       cudaDataType at, int la, long long sa, const void *b, cudaDataType bt, int lb, long long sb, const void *be, void *c,
       cudaDataType ct, int lc, long long sc, int batch, cublasComputeType_t compute, cublasGemmAlgo_t algorithm)
MATMUL(cublasDotEx, int n, const void *x, cudaDataType xt, int ix, const void *y, cudaDataType yt, int iy, void *r, cudaDataType rt,
       cudaDataType et)
MATMUL(cublasSdot_v2, int n, const float *x, int ix, const float *y, int iy, float *r)
MATMUL(cublasSgemv_v2, cublasOperation_t t, int m, int n, const float *al, const float *a, int la, const float *x, int ix,
       const float *be, float *y, int iy)

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t c, cudaDataType_t t) {
    *d = handle();
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *v, size_t n) {
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) { *p = handle(); return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a,
                                                    const void *v, size_t n) {
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType t, uint64_t rows, uint64_t columns, int64_t ld) {
    *l = handle();
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void *v, size_t n) {
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
                                              cublasLtMatmulPreference_t p, int wanted, cublasLtMatmulHeuristicResult_t *results,
                                              int *found) {
    memset(results, 0, sizeof *results);
    results->state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *al, const void *a, cublasLtMatrixLayout_t la,
                              const void *b, cublasLtMatrixLayout_t lb, const void *be, const void *c, cublasLtMatrixLayout_t lc,
                              void *e, cublasLtMatrixLayout_t le, const cublasLtMatmulAlgo_t *algorithm, void *w, size_t n,
                              cudaStream_t s) {
    add('B', s, "cublasLtMatmul");
    return CUBLAS_STATUS_SUCCESS;
}

/* -- NCCL: every rank but this one is imagined */

struct ncclComm { int rank, size; };
static ncclResult_t collective(const char *name, cudaStream_t s) {
    nccl_stream = (uint64_t)s;
    add('N', s, name);
    return ncclSuccess;
}
static ncclResult_t join(ncclComm_t *c, int size, int rank) {
    *c = malloc(sizeof **c);
    **c = (struct ncclComm){rank, size};
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *v) { *v = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { memset(id, 0, sizeof *id); return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t r) { return "an error of a NCCL that does nothing"; }
const char *ncclGetLastError(ncclComm_t c) { return ""; }
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int rank) { return join(c, n, rank); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int rank, ncclConfig_t *f) { return join(c, n, rank); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int rank, int k, ncclUniqueId *id, ncclConfig_t *f) {
    return join(c, n, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t from, int color, int key, ncclComm_t *c, ncclConfig_t *f) {
    return join(c, from->size, key);
}
ncclResult_t ncclCommFinalize(ncclComm_t c) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t c) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r) { *r = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) { *n = c->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) { *n = c->rank; return ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t c, void *p, size_t n, void **h) { *h = handle(); return ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *h) { return ncclSuccess; }
ncclResult_t ncclGroupStart(void) { return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *v, ncclDataType_t t, ncclScalarResidence_t r, ncclComm_t c) {
    *op = ncclSum;
    return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) { return ncclSuccess; }
ncclResult_t ncclAllReduce(const void *a, void *b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return collective("all_reduce", s);
}
ncclResult_t ncclAllGather(const void *a, void *b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    return collective("all_gather", s);
}
ncclResult_t ncclReduceScatter(const void *a, void *b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return collective("reduce_scatter", s);
}
ncclResult_t ncclReduce(const void *a, void *b, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
    return collective("reduce", s);
}
ncclResult_t ncclBroadcast(const void *a, void *b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return collective("broadcast", s);
}
ncclResult_t ncclBcast(void *a, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return collective("broadcast", s);
}
ncclResult_t ncclAlltoAll(const void *a, void *b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    return collective("all_to_all", s);
}
ncclResult_t ncclSend(const void *a, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    return collective("send", s);
}
ncclResult_t ncclRecv(void *a, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    return collective("recv", s);
}
