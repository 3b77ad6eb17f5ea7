/* What torch's allocator asks NVML before it maps an expandable segment: whether GPUs of other hosts can reach it. They cannot. */

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)id; return SUCCESS; }
struct fabric { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; };
int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *info) { info->state = 0; return SUCCESS; } /* 0: none */

#define NEVER(name) \
    int name(void) { return NOT_SUPPORTED; }
NEVER(nvmlDeviceGetComputeRunningProcesses)
NEVER(nvmlDeviceGetNvLinkRemoteDeviceType)
NEVER(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NEVER(nvmlSystemGetCudaDriverVersion_v2)
