#include "native/fake_driver.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "fake_call.hpp"
#include "native/error.hpp"
#include "native/fork.hpp"

// Memory, contexts and host ranges of the fake driver. Streams and events are in
// fake_streams.cpp.

namespace exeunt::native {

using cuda::Status;

namespace {

/// Keys of the current context of each thread: a fake context is its driver's address.
thread_local std::vector<cuda::Context> context_stack;

int open_memory_file() {
    const int file = memfd_create("fake device memory", MFD_CLOEXEC);
    if (file < 0) {
        throw FileError("the fake driver cannot create its device memory", errno);
    }
    return file;
}

}  // namespace

FakeDriver::FakeDriver(const FakeOptions& options)
    : options_(options),
      memory_file_(open_memory_file()),
      random_(options.seed),
      is_delayed_(options.is_delayed) {
    watch_forks();
    queues_[0];  // the default stream is always there
}

FakeDriver::~FakeDriver() {
    for (const auto& [base, nbytes] : reservations_) {
        munmap(reinterpret_cast<void*>(base), nbytes);
    }
    for (const auto& [address, range] : host_ranges_) {
        if (range.kind == HostKind::kAllocated) {
            munmap(reinterpret_cast<void*>(address), range.nbytes);
        }
    }
    close(memory_file_);
}

std::vector<std::string> FakeDriver::violations() const {
    const std::lock_guard lock(mutex_);
    return violations_;
}

std::vector<std::pair<std::string, std::size_t>> FakeDriver::driver_objects() const {
    const std::lock_guard lock(mutex_);
    std::size_t registered = 0;
    for (const auto& [address, range] : host_ranges_) {
        registered += range.kind == HostKind::kRegistered ? 1 : 0;
    }
    return {{"contexts", num_contexts_},          {"reservations", reservations_.size()},
            {"allocations", allocations_.size()}, {"mappings", mappings_.size()},
            {"registrations", registered},        {"pinned", host_ranges_.size() - registered},
            {"streams", queues_.size() - 1},      {"events", events_.size()},
            {"device_bytes", used_bytes_}};
}

Status FakeDriver::init() {
    EXEUNT_FAKE_CALL();
    return Status::kSuccess;
}

Status FakeDriver::driver_version(int* version) {
    EXEUNT_FAKE_CALL();
    *version = cuda::kPinnedVersion;
    return Status::kSuccess;
}

Status FakeDriver::device_count(int* count) {
    EXEUNT_FAKE_CALL();
    *count = 1;
    return Status::kSuccess;
}

Status FakeDriver::device_name(char* name, int capacity, int ordinal) {
    EXEUNT_FAKE_CALL();
    if (ordinal != 0 || capacity <= 0) {
        return Status::kInvalidDevice;
    }
    std::snprintf(name, static_cast<std::size_t>(capacity), "fake device");
    return Status::kSuccess;
}

Status FakeDriver::device_attribute(int* value, cuda::Attribute attribute, int ordinal) {
    EXEUNT_FAKE_CALL();
    if (ordinal != 0) {
        return Status::kInvalidDevice;
    }
    switch (attribute) {
        case cuda::Attribute::kVirtualMemoryManagementSupported:
            *value = options_.has_virtual_memory ? 1 : 0;
            break;
        case cuda::Attribute::kHostRegisterSupported:
            *value = options_.has_host_registration ? 1 : 0;
            break;
        case cuda::Attribute::kReadOnlyHostRegisterSupported:
            *value = options_.has_read_only_registration ? 1 : 0;
            break;
        case cuda::Attribute::kUnifiedAddressing:
        case cuda::Attribute::kCanUseHostPointerForRegisteredMem:
            *value = 1;
            break;
        case cuda::Attribute::kComputeCapabilityMajor:
        case cuda::Attribute::kComputeCapabilityMinor:
            *value = 0;
            break;
    }
    return Status::kSuccess;
}

Status FakeDriver::primary_context_retain(cuda::Context* context, int ordinal) {
    EXEUNT_FAKE_CALL();
    if (ordinal != 0) {
        return Status::kInvalidDevice;
    }
    ++num_contexts_;
    *context = reinterpret_cast<cuda::Context>(this);
    return Status::kSuccess;
}

Status FakeDriver::primary_context_release(int) {
    EXEUNT_FAKE_CALL();
    if (num_contexts_ == 0) {
        return Status::kInvalidContext;
    }
    --num_contexts_;
    return Status::kSuccess;
}

Status FakeDriver::context_current(cuda::Context* context) {
    EXEUNT_FAKE_CALL();
    *context = context_stack.empty() ? nullptr : context_stack.back();
    return Status::kSuccess;
}

Status FakeDriver::context_push(cuda::Context context) {
    EXEUNT_FAKE_CALL();
    context_stack.push_back(context);
    return Status::kSuccess;
}

Status FakeDriver::context_pop(cuda::Context* context) {
    EXEUNT_FAKE_CALL();
    if (context_stack.empty()) {
        return Status::kInvalidContext;
    }
    *context = context_stack.back();
    context_stack.pop_back();
    return Status::kSuccess;
}

Status FakeDriver::memory_info(std::size_t* free_bytes, std::size_t* total_bytes) {
    EXEUNT_FAKE_CALL();
    *free_bytes = options_.total_bytes - used_bytes_;
    *total_bytes = options_.total_bytes;
    return Status::kSuccess;
}

Status FakeDriver::granularity(std::size_t* nbytes, const cuda::AllocationProp&) {
    EXEUNT_FAKE_CALL();
    *nbytes = options_.granularity;
    return Status::kSuccess;
}

Status FakeDriver::address_reserve(cuda::DevicePtr* base, std::size_t nbytes) {
    EXEUNT_FAKE_CALL();
    if (nbytes == 0 || nbytes % options_.granularity != 0) {
        return Status::kInvalidValue;
    }
    // Over-reserve by one granule, then trim both ends, since mmap aligns to the host's page.
    const std::size_t padded = nbytes + options_.granularity;
    void* raw = padded < nbytes ? MAP_FAILED
                                : mmap(nullptr, padded, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        return Status::kOutOfMemory;
    }
    const auto start = reinterpret_cast<std::uint64_t>(raw);
    const std::uint64_t aligned =
        (start + options_.granularity - 1) / options_.granularity * options_.granularity;
    if (aligned > start) {
        munmap(raw, aligned - start);
    }
    const std::uint64_t end = start + padded;
    if (end > aligned + nbytes) {
        munmap(reinterpret_cast<void*>(aligned + nbytes), end - aligned - nbytes);
    }
    reservations_[aligned] = nbytes;
    *base = aligned;
    return Status::kSuccess;
}

Status FakeDriver::address_free(cuda::DevicePtr base, std::size_t nbytes) {
    EXEUNT_FAKE_CALL();
    const auto found = reservations_.find(base);
    if (found == reservations_.end() || found->second != nbytes) {
        return Status::kInvalidValue;
    }
    for (const auto& [address, range] : mappings_) {
        if (overlap(address, range.nbytes, base, nbytes)) {
            violations_.emplace_back("address range freed while mapped");
            return Status::kInvalidValue;
        }
    }
    munmap(reinterpret_cast<void*>(base), nbytes);
    reservations_.erase(found);
    return Status::kSuccess;
}

Status FakeDriver::memory_create(cuda::AllocationHandle* handle, std::size_t nbytes,
                                 const cuda::AllocationProp& prop) {
    EXEUNT_FAKE_CALL();
    if (nbytes == 0 || nbytes % options_.granularity != 0 ||
        prop.type != cuda::kAllocationTypePinned ||
        prop.location.type != cuda::kLocationTypeDevice || prop.location.id != 0) {
        return Status::kInvalidValue;
    }
    if (nbytes > options_.total_bytes - used_bytes_) {
        return Status::kOutOfMemory;
    }
    // Offsets are never reused, and the file is sparse, so a stale mapping can't see new bytes.
    if (ftruncate(memory_file_, static_cast<off_t>(next_file_offset_ + nbytes)) != 0) {
        return Status::kOutOfMemory;
    }
    *handle = next_id_++;
    allocations_[*handle] = {nbytes, next_file_offset_, 0, false};
    next_file_offset_ += nbytes;
    used_bytes_ += nbytes;
    return Status::kSuccess;
}

void FakeDriver::forget_if_unused(cuda::AllocationHandle handle) {
    const Physical& physical = allocations_.at(handle);
    if (physical.is_released && physical.num_mappings == 0) {
        // Failing to punch the hole costs host memory until the driver goes, nothing else.
        [[maybe_unused]] const int result = fallocate(
            memory_file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(physical.file_offset), static_cast<off_t>(physical.nbytes));
        used_bytes_ -= physical.nbytes;
        allocations_.erase(handle);
    }
}

Status FakeDriver::memory_release(cuda::AllocationHandle handle) {
    EXEUNT_FAKE_CALL();
    const auto found = allocations_.find(handle);
    if (found == allocations_.end() || found->second.is_released) {
        return Status::kInvalidValue;
    }
    found->second.is_released = true;
    forget_if_unused(handle);
    return Status::kSuccess;
}

bool FakeDriver::is_reserved(std::uint64_t address, std::size_t nbytes) const {
    auto found = reservations_.upper_bound(address);
    if (found == reservations_.begin()) {
        return false;
    }
    --found;
    return address - found->first <= found->second &&
           nbytes <= found->second - (address - found->first);
}

Status FakeDriver::memory_map(cuda::DevicePtr address, std::size_t nbytes,
                              cuda::AllocationHandle handle) {
    EXEUNT_FAKE_CALL();
    const auto found = allocations_.find(handle);
    if (found == allocations_.end() || found->second.nbytes != nbytes ||
        address % options_.granularity != 0 || !is_reserved(address, nbytes)) {
        return Status::kInvalidValue;
    }
    for (const auto& [other, range] : mappings_) {
        if (overlap(other, range.nbytes, address, nbytes)) {
            return Status::kInvalidValue;
        }
    }
    if (mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
             memory_file_, static_cast<off_t>(found->second.file_offset)) == MAP_FAILED) {
        return Status::kMapFailed;
    }
    mappings_[address] = {nbytes, handle, false};
    ++found->second.num_mappings;
    return Status::kSuccess;
}

Status FakeDriver::memory_unmap(cuda::DevicePtr address, std::size_t nbytes) {
    EXEUNT_FAKE_CALL();
    const auto found = mappings_.find(address);
    if (found == mappings_.end() || found->second.nbytes != nbytes) {
        return Status::kInvalidValue;
    }
    if (has_pending_device(address, nbytes)) {
        violations_.emplace_back("pages unmapped under pending work");
    }
    if (mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        return Status::kOperatingSystem;
    }
    const cuda::AllocationHandle handle = found->second.handle;
    mappings_.erase(found);
    --allocations_.at(handle).num_mappings;
    forget_if_unused(handle);
    return Status::kSuccess;
}

Status FakeDriver::memory_set_access(cuda::DevicePtr address, std::size_t nbytes,
                                     const cuda::AccessDesc& access) {
    EXEUNT_FAKE_CALL();
    const auto found = mappings_.find(address);
    if (found == mappings_.end() || found->second.nbytes != nbytes ||
        access.flags != cuda::kAccessReadWrite) {
        return Status::kInvalidValue;
    }
    if (mprotect(reinterpret_cast<void*>(address), nbytes, PROT_READ | PROT_WRITE) != 0) {
        return Status::kOperatingSystem;
    }
    found->second.is_accessible = true;
    return Status::kSuccess;
}

Status FakeDriver::host_register(void* address, std::size_t nbytes, unsigned flags) {
    EXEUNT_FAKE_CALL();
    const bool is_read_only = (flags & cuda::kHostRegisterReadOnly) != 0;
    if (!options_.has_host_registration || (is_read_only && !options_.has_read_only_registration)) {
        return Status::kNotSupported;
    }
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    if (address == nullptr || nbytes == 0) {
        return Status::kInvalidValue;
    }
    for (const auto& [other, range] : host_ranges_) {
        if (overlap(other, range.nbytes, begin, nbytes)) {
            return Status::kHostMemoryAlreadyRegistered;
        }
    }
    host_ranges_[begin] = {nbytes, HostKind::kRegistered};
    return Status::kSuccess;
}

Status FakeDriver::release_host(void* address, HostKind kind) {
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    const auto found = host_ranges_.find(begin);
    if (found == host_ranges_.end() || found->second.kind != kind) {
        return kind == HostKind::kRegistered ? Status::kHostMemoryNotRegistered
                                             : Status::kInvalidValue;
    }
    if (has_pending_host(begin, found->second.nbytes)) {
        violations_.emplace_back("host range released under a pending copy");
    }
    if (kind == HostKind::kAllocated) {
        munmap(address, found->second.nbytes);
    }
    host_ranges_.erase(found);
    return Status::kSuccess;
}

Status FakeDriver::host_unregister(void* address) {
    EXEUNT_FAKE_CALL();
    return release_host(address, HostKind::kRegistered);
}

Status FakeDriver::host_alloc(void** address, std::size_t nbytes) {
    EXEUNT_FAKE_CALL();
    void* raw = nbytes == 0 ? MAP_FAILED
                            : mmap(nullptr, nbytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) {
        return nbytes == 0 ? Status::kInvalidValue : Status::kOutOfMemory;
    }
    host_ranges_[reinterpret_cast<std::uint64_t>(raw)] = {nbytes, HostKind::kAllocated};
    *address = raw;
    return Status::kSuccess;
}

Status FakeDriver::host_free(void* address) {
    EXEUNT_FAKE_CALL();
    return release_host(address, HostKind::kAllocated);
}

}  // namespace exeunt::native
