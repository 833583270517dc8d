/* A stand-in for libcuda.so.1, of the calls that kvctl.memory.libcuda makes: a "GPU" whose memory is memfds, mapped into
 * the host's address space. It refuses what cuda.h and NVIDIA's documentation refuse (sizes that are no pages, unknown
 * handles, memory that was not made to be shared), so that the calls, their order and their structures are tested where no
 * GPU is. STAND_IN_BYTES: what one process may hold at once (1 GiB); STAND_IN_WITHOUT: an attribute that the device lacks.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if __has_include(<cuda.h>)
#include <cuda.h>
#else
typedef int CUresult, CUdevice, CUmemAllocationHandleType, CUmemAllocationGranularity_flags, CUdevice_attribute;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_OUT_OF_MEMORY 2
#define CUDA_ERROR_NOT_INITIALIZED 3
#define CUDA_ERROR_INVALID_DEVICE 101
#endif
#undef cuDeviceGetUuid

#define PAGE (2ull << 20)
#define MOST 64

static int ready;
static struct { int fd; size_t size; } handles[MOST]; /* a handle is an index + 1 */
static struct { uint64_t address; size_t size; uint64_t handle; } ranges[MOST];

static CUresult at(uint64_t handle) { return handle && handle <= MOST && handles[handle - 1].size ? 0 : CUDA_ERROR_INVALID_VALUE; }

static int range_of(uint64_t address, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (ranges[i].size && ranges[i].address == address && ranges[i].size == size) return i;
    return -1;
}

static CUresult keep(CUmemGenericAllocationHandle *handle, int fd, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (!handles[i].size) {
            handles[i].fd = fd, handles[i].size = size, *handle = i + 1;
            return CUDA_SUCCESS;
        }
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static int usable(const CUmemAllocationProp *prop) {
    return ready && prop->type == 1 && prop->requestedHandleTypes == 1 && prop->location.type == 1 && prop->location.id == 0 &&
           !prop->win32HandleMetaData && prop->allocFlags.gpuDirectRDMACapable == 1 && !prop->allocFlags.compressionType &&
           !prop->allocFlags.usage;
}

CUresult cuInit(unsigned int flags) {
    ready = 1;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_INVALID_VALUE    ? "CUDA_ERROR_INVALID_VALUE"
            : error == CUDA_ERROR_OUT_OF_MEMORY  ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
                                                 : NULL;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!ready) return CUDA_ERROR_NOT_INITIALIZED;
    *device = ordinal;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    const char *without = getenv("STAND_IN_WITHOUT");
    if (attribute != 102 && attribute != 103 && attribute != 110) return CUDA_ERROR_INVALID_VALUE;
    *value = !without || atoi(without) != (int)attribute;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    for (int i = 0; i < 16; i++) uuid->bytes[i] = (char)i;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *page, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    *page = PAGE;
    return usable(prop) && option == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    const char *most = getenv("STAND_IN_BYTES");
    if (!usable(prop) || !size || size % PAGE || flags) return CUDA_ERROR_INVALID_VALUE;
    if (size > (most ? strtoull(most, NULL, 10) : 1ull << 30)) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memfd_create("gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    return keep(handle, fd, size);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (at(handle)) return CUDA_ERROR_INVALID_VALUE;
    close(handles[handle - 1].fd);
    handles[handle - 1].size = 0;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *fd, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    if (at(handle) || type != 1 || flags) return CUDA_ERROR_INVALID_VALUE;
    *(int *)fd = dup(handles[handle - 1].fd);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *given, CUmemAllocationHandleType type) {
    struct stat status;
    int fd = (int)(intptr_t)given;
    if (!ready || type != 1 || fstat(fd, &status) || status.st_size % (off_t)PAGE) return CUDA_ERROR_INVALID_VALUE;
    return keep(handle, dup(fd), (size_t)status.st_size);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    if (!ready || !size || size % PAGE || flags) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (!ranges[i].size) {
            void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
            *address = ranges[i].address = (uint64_t)(uintptr_t)found;
            ranges[i].size = size, ranges[i].handle = 0;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    int i = range_of(address, size);
    if (i < 0 || ranges[i].handle) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)(uintptr_t)address, size);
    ranges[i].size = 0;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    int i = range_of(address, size);
    if (i < 0 || at(handle) || offset || flags || size > handles[handle - 1].size) return CUDA_ERROR_INVALID_VALUE;
    /* no access until cuMemSetAccess */
    if (mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle - 1].fd, 0) == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    ranges[i].handle = handle;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count) {
    int i = range_of(address, size);
    if (i < 0 || !ranges[i].handle || count != 1 || desc->location.type != 1 || desc->location.id != 0) return CUDA_ERROR_INVALID_VALUE;
    if (desc->flags != 1 && desc->flags != 3) return CUDA_ERROR_INVALID_VALUE;
    mprotect((void *)(uintptr_t)address, size, desc->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    int i = range_of(address, size);
    if (i < 0 || !ranges[i].handle) return CUDA_ERROR_INVALID_VALUE;
    mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    ranges[i].handle = 0;
    return CUDA_SUCCESS;
}
