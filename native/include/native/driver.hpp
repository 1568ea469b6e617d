#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "native/abi.hpp"

namespace exeunt::native {

/// Whether the CUDA driver library can be loaded, and why not.
struct Availability {
    bool is_available;
    std::string reason;
};

/// Loads libcuda.so.1 without calling into it.
[[nodiscard]] Availability probe_driver();

/// What one device can do; decided once, when it is opened.
struct Capabilities {
    bool has_virtual_memory = false;
    bool has_host_registration = false;
    bool has_read_only_registration = false;
    int compute_major = 0;
    int compute_minor = 0;
};

/// The driver calls that the library makes: the real driver or the fake one.
///
/// Each method returns the driver's status and throws nothing; `check()` turns a status into a
/// CudaError. Methods are thread-safe. All but the first few expect the device's context current.
class Driver {
  public:
    virtual ~Driver() = default;
    Driver() = default;
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    using Status = cuda::Status;
    [[nodiscard]] virtual bool is_fake() const noexcept = 0;

    virtual Status init() = 0;
    virtual Status driver_version(int* version) = 0;
    virtual Status device_count(int* count) = 0;
    virtual Status device_name(char* name, int capacity, int ordinal) = 0;
    virtual Status device_attribute(int* value, cuda::Attribute attribute, int ordinal) = 0;
    virtual Status primary_context_retain(cuda::Context* context, int ordinal) = 0;
    virtual Status primary_context_release(int ordinal) = 0;
    virtual Status context_current(cuda::Context* context) = 0;
    virtual Status context_push(cuda::Context context) = 0;
    virtual Status context_pop(cuda::Context* context) = 0;
    virtual Status context_synchronize() = 0;
    virtual Status memory_info(std::size_t* free_bytes, std::size_t* total_bytes) = 0;

    virtual Status granularity(std::size_t* nbytes, const cuda::AllocationProp& prop) = 0;
    virtual Status address_reserve(cuda::DevicePtr* base, std::size_t nbytes) = 0;
    virtual Status address_free(cuda::DevicePtr base, std::size_t nbytes) = 0;
    virtual Status memory_create(cuda::AllocationHandle* handle, std::size_t nbytes,
                                 const cuda::AllocationProp& prop) = 0;
    virtual Status memory_release(cuda::AllocationHandle handle) = 0;
    virtual Status memory_map(cuda::DevicePtr address, std::size_t nbytes,
                              cuda::AllocationHandle handle) = 0;
    virtual Status memory_unmap(cuda::DevicePtr address, std::size_t nbytes) = 0;
    virtual Status memory_set_access(cuda::DevicePtr address, std::size_t nbytes,
                                     const cuda::AccessDesc& access) = 0;

    virtual Status host_register(void* address, std::size_t nbytes, unsigned flags) = 0;
    virtual Status host_unregister(void* address) = 0;
    virtual Status host_alloc(void** address, std::size_t nbytes) = 0;
    virtual Status host_free(void* address) = 0;
    virtual Status copy_to_device(cuda::DevicePtr target, const void* source, std::size_t nbytes,
                                  cuda::Stream stream) = 0;
    virtual Status copy_to_host(void* target, cuda::DevicePtr source, std::size_t nbytes,
                                cuda::Stream stream) = 0;

    virtual Status stream_create(cuda::Stream* stream) = 0;
    virtual Status stream_destroy(cuda::Stream stream) = 0;
    virtual Status stream_synchronize(cuda::Stream stream) = 0;
    virtual Status stream_wait_event(cuda::Stream stream, cuda::Event event) = 0;
    virtual Status event_create(cuda::Event* event, unsigned flags) = 0;
    virtual Status event_destroy(cuda::Event event) = 0;
    virtual Status event_record(cuda::Event event, cuda::Stream stream) = 0;
    virtual Status event_query(cuda::Event event) = 0;
    virtual Status event_synchronize(cuda::Event event) = 0;
    virtual Status event_elapsed_ms(float* elapsed, cuda::Event begin, cuda::Event end) = 0;

    /// Lets the `nth` call from now (1 is the next one) return `status` without being made.
    /// 0 disarms. Works on the real driver as well: a refused call changes nothing there.
    void inject_fault(std::uint64_t nth, Status status);
    /// Calls made so far, refused ones included.
    [[nodiscard]] std::uint64_t num_calls() const noexcept { return num_calls_.load(); }
    /// Whether the armed fault has been delivered.
    [[nodiscard]] bool fault_was_delivered() const noexcept { return was_delivered_.load(); }

  protected:
    /// Counts one call; success unless this one is to fail.
    [[nodiscard]] Status begin_call() noexcept;

  private:
    std::atomic<std::uint64_t> num_calls_{0};
    std::atomic<std::uint64_t> fault_at_{0};
    std::atomic<Status> fault_status_{Status::kSuccess};
    std::atomic<bool> was_delivered_{false};
};

/// The CUDA driver of this machine, loaded and initialised; DriverUnavailable says why not.
[[nodiscard]] std::shared_ptr<Driver> open_cuda_driver();

}  // namespace exeunt::native
