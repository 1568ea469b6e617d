#pragma once

// The part of the CUDA driver's binary interface that this library uses, written down so that it
// builds without a CUDA toolkit. Values and layouts are stable by the driver's promise of backward
// compatibility; where a toolkit's cuda.h is found, a test compares each of them with it.

#include <cstddef>
#include <cstdint>

namespace exeunt::native::cuda {

using DevicePtr = std::uint64_t;
using DeviceOrdinal = int;
using AllocationHandle = std::uint64_t;
using Context = struct ContextOpaque*;
using Stream = struct StreamOpaque*;
using Event = struct EventOpaque*;

enum class Status : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kDeinitialized = 4,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidContext = 201,
    kMapFailed = 205,
    kAlreadyMapped = 208,
    kNotMapped = 211,
    kOperatingSystem = 304,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kContextIsDestroyed = 709,
    kHostMemoryAlreadyRegistered = 712,
    kHostMemoryNotRegistered = 713,
    kNotSupported = 801,
    kUnknown = 999,
};

enum class Attribute : int {
    kUnifiedAddressing = 41,
    kComputeCapabilityMajor = 75,
    kComputeCapabilityMinor = 76,
    kCanUseHostPointerForRegisteredMem = 91,
    kHostRegisterSupported = 99,
    kVirtualMemoryManagementSupported = 102,
    kReadOnlyHostRegisterSupported = 113,
};

inline constexpr int kAllocationTypePinned = 1;
inline constexpr int kLocationTypeDevice = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr unsigned kHostRegisterPortable = 0x1;
inline constexpr unsigned kHostRegisterReadOnly = 0x8;
inline constexpr unsigned kStreamNonBlocking = 0x1;
inline constexpr unsigned kEventDefault = 0x0;
inline constexpr unsigned kEventDisableTiming = 0x2;
/// Entry points are asked for as they were in this version, so a newer driver's changed signature
/// under the same name is never called with the old one.
inline constexpr int kPinnedVersion = 12000;
inline constexpr int kOldestVersion = 11040;

struct Location {
    int type;
    int id;
};

struct AllocationProp {
    int type;
    int requested_handle_types;
    Location location;
    void* win32_handle_metadata;
    struct {
        unsigned char compression_type;
        unsigned char gpu_direct_rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } alloc_flags;
};

struct AccessDesc {
    Location location;
    int flags;
};

static_assert(sizeof(void*) == 8, "the driver's 64-bit interface is the only one described");
static_assert(sizeof(Location) == 8);
static_assert(sizeof(AllocationProp) == 32);
static_assert(offsetof(AllocationProp, requested_handle_types) == 4);
static_assert(offsetof(AllocationProp, location) == 8);
static_assert(offsetof(AllocationProp, win32_handle_metadata) == 16);
static_assert(offsetof(AllocationProp, alloc_flags) == 24);
static_assert(sizeof(AccessDesc) == 12);
static_assert(offsetof(AccessDesc, flags) == 8);

}  // namespace exeunt::native::cuda
