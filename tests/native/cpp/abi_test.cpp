#include "native/abi.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>

#include "harness.hpp"

// Compiled only where a CUDA toolkit is installed; all comparisons happen at compile time.

namespace cuda = exeunt::native::cuda;

#define SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))

SAME(cuda::Status::kInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME(cuda::Status::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(cuda::Status::kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
SAME(cuda::Status::kDeinitialized, CUDA_ERROR_DEINITIALIZED);
SAME(cuda::Status::kNoDevice, CUDA_ERROR_NO_DEVICE);
SAME(cuda::Status::kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
SAME(cuda::Status::kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
SAME(cuda::Status::kMapFailed, CUDA_ERROR_MAP_FAILED);
SAME(cuda::Status::kAlreadyMapped, CUDA_ERROR_ALREADY_MAPPED);
SAME(cuda::Status::kNotMapped, CUDA_ERROR_NOT_MAPPED);
SAME(cuda::Status::kOperatingSystem, CUDA_ERROR_OPERATING_SYSTEM);
SAME(cuda::Status::kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
SAME(cuda::Status::kNotFound, CUDA_ERROR_NOT_FOUND);
SAME(cuda::Status::kNotReady, CUDA_ERROR_NOT_READY);
SAME(cuda::Status::kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(cuda::Status::kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(cuda::Status::kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(cuda::Status::kHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(cuda::Status::kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
SAME(cuda::Status::kUnknown, CUDA_ERROR_UNKNOWN);
SAME(cuda::Attribute::kUnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(cuda::Attribute::kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(cuda::Attribute::kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(cuda::Attribute::kCanUseHostPointerForRegisteredMem,
     CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(cuda::Attribute::kHostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME(cuda::Attribute::kVirtualMemoryManagementSupported,
     CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(cuda::Attribute::kReadOnlyHostRegisterSupported,
     CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
SAME(cuda::kAllocationTypePinned, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(cuda::kLocationTypeDevice, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(cuda::kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(cuda::kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(cuda::kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
SAME(cuda::kHostRegisterPortable, CU_MEMHOSTALLOC_PORTABLE);
SAME(cuda::kHostRegisterReadOnly, CU_MEMHOSTREGISTER_READ_ONLY);
SAME(cuda::kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(cuda::kEventDefault, CU_EVENT_DEFAULT);
SAME(cuda::kEventDisableTiming, CU_EVENT_DISABLE_TIMING);

static_assert(sizeof(cuda::DevicePtr) == sizeof(CUdeviceptr));
static_assert(sizeof(cuda::AllocationHandle) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(cuda::AllocationProp) == sizeof(CUmemAllocationProp));
static_assert(alignof(cuda::AllocationProp) == alignof(CUmemAllocationProp));
static_assert(offsetof(cuda::AllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(cuda::AllocationProp, win32_handle_metadata) ==
              offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(cuda::AllocationProp, alloc_flags) ==
              offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(cuda::AccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(cuda::AccessDesc, flags) == offsetof(CUmemAccessDesc, flags));

TEST("the interface header agrees with the toolkit's") { CHECK(CUDA_VERSION >= 12000); }
